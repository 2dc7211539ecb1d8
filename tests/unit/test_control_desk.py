"""Tickets: one at a time is open, a save answers it, and a stop is answered by the save that stops."""

from __future__ import annotations

import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline import ConfigError, Control, PipelineOptions, ReplayBuffer, TrajectoryBuffer
from pipeline.config import ReplayOptions, without_secrets
from pipeline.control import Desk
from tests.support.runs import pipeline


def posted(desk: Desk, then: Any = "continue") -> Any:
    ticket = desk.post(then)
    assert ticket is not None
    return ticket


class TestDesk:
    def test_who_asks_meanwhile_gets_the_same_ticket_also_while_it_is_saved(self) -> None:
        desk, woken = Desk(), list[int]()
        desk.wake = lambda: woken.append(1)
        first = posted(desk)
        assert posted(desk) is first
        assert (desk.take(), desk.take(), woken) == ("continue", None, [1])
        saved = desk.begun()
        assert saved is first
        assert posted(desk) is first
        assert not desk.asked, "the save that is being written answers it"
        desk.ended(saved, 7, 70, stops=False)
        assert first.described() == {
            "id": first.id,
            "state": "done",
            "then": "continue",
            "generation": 7,
            "step": 70,
        }
        assert posted(desk) is not first

    def test_a_save_that_nobody_asked_for_answers_who_asks_while_it_is_written(self) -> None:
        desk = Desk()
        saved = desk.begun()
        assert posted(desk) is saved
        assert not desk.asked
        desk.ended(saved, 1, 10, stops=False)
        assert desk.find(saved.id) is saved

    def test_a_stop_is_done_when_the_run_stops_and_not_before(self) -> None:
        desk = Desk()
        ticket = posted(desk)
        assert desk.take() == "continue"
        saved = desk.begun()
        assert posted(desk, "stop") is ticket
        assert desk.asked
        desk.ended(saved, 1, 10, stops=False)
        assert ticket.state == "pending"
        assert (desk.take(), desk.begun()) == ("stop", ticket)
        desk.ended(ticket, 2, 11, stops=True)
        assert ticket.described()["generation"] == 2
        assert ticket.then == "stop"

    def test_a_stop_that_nobody_took_is_not_lost_when_a_save_begins(self) -> None:
        desk = Desk()
        posted(desk, "stop")
        desk.begun()
        assert desk.take() == "stop"

    def test_a_stop_that_is_asked_for_while_a_save_is_written_which_fails_is_still_to_come(self) -> None:
        desk = Desk()
        saved = desk.begun()
        ticket = posted(desk, "stop")
        assert ticket is saved
        desk.failed(saved, "no space", stops=False)
        assert (ticket.state, desk.asked) == ("pending", True)
        assert (desk.take(), desk.begun()) == ("stop", ticket)
        desk.ended(ticket, 2, 11, stops=True)
        assert ticket.described()["generation"] == 2
        last = posted(desk, "stop")
        desk.failed(last, "no space", stops=True)
        assert last.described()["reason"] == "no space"

    def test_a_failed_one_says_why_and_the_next_request_is_another(self) -> None:
        desk, told = Desk(), list[int]()
        desk.tell = lambda: told.append(1)
        ticket = posted(desk)
        desk.failed(desk.begun(), "no space", stops=False)
        desk.ended(ticket, 1, 1, stops=True)
        assert (ticket.described()["reason"], ticket.state, told) == ("no space", "failed", [1])
        assert posted(desk).id != ticket.id

    def test_closed_it_takes_none_and_what_is_open_has_failed(self) -> None:
        desk = Desk()
        ticket = posted(desk)
        desk.close("over")
        desk.close("over again")
        assert (ticket.state, ticket.reason, desk.post("stop"), desk.closed) == ("failed", "over", None, "over")

    def test_the_newest_hundred_are_kept(self) -> None:
        desk = Desk()
        made = []
        for number in range(250):
            made.append(posted(desk).id)
            desk.ended(None, number, number, stops=True)
        assert [name for name in made if desk.find(name)] == made[-100:]

    @pytest.mark.parametrize("seed", range(50))
    def test_whatever_happens_each_request_is_answered_by_a_save_that_ended_after_it(self, seed: int) -> None:
        """A run that hears, saves, fails and stops at random: no ticket is left, none is done by an older save."""
        rng, desk = random.Random(seed), Desk()
        asked: dict[str, tuple[Any, int, bool]] = {}
        generation, wants, saving = 0, None, None
        for _ in range(200):
            do = rng.choice(["post", "post stop", "hear", "begin", "end", "fail"])
            if do.startswith("post"):
                then = "stop" if "stop" in do else "continue"
                ticket = posted(desk, then)
                assert ticket.state == "pending"
                _, since, stop = asked.get(ticket.id, (ticket, generation, False))
                asked[ticket.id] = ticket, since, stop or then == "stop"
            elif do == "hear" or (do == "begin" and saving is None):
                heard = desk.take()
                wants = "stop" if "stop" in (wants, heard) else heard or wants
                if do == "begin":
                    saving, wants = (desk.begun(), wants == "stop"), None
            elif saving is not None and do in ("end", "fail"):
                ticket, stops = saving
                generation, saving = generation + 1, None
                if do == "end":
                    desk.ended(ticket, generation, generation, stops=stops)
                else:
                    desk.failed(ticket, "it failed", stops=False)
        for ticket, since, stop in asked.values():
            assert (ticket.then == "stop") == stop
            if ticket.state == "done":
                assert ticket.generation > since
        desk.close("over")
        assert all(ticket.state != "pending" for ticket, _, _ in asked.values())


class TestOptions:
    def test_what_is_given_comes_back_and_the_token_is_written_nowhere(self) -> None:
        for given in ("127.0.0.1:0", {"host": "127.0.0.1", "port": 0}, Control()):
            options = PipelineOptions(directory="runs/a", control=given)  # type: ignore[arg-type]
            assert options.control == Control()
            assert PipelineOptions.of(options.to_dict()) == options
        secret = Control(host="0.0.0.0", port=5, token="s3cret")
        for made in (
            PipelineOptions(directory="a", control=secret),
            ReplayOptions.build(5, {"directory": "a", "control": secret}),
        ):
            assert made.listens == secret
            assert "s3cret" not in repr(made)
            assert "s3cret" not in repr(without_secrets(made.to_dict()))
            assert made.to_dict()["control"]["token"] == "s3cret"

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ("0.0.0.0:80", "whoever reaches it could stop the run; give a token="),
            ("[::]:80", "give a token="),
            ("example.com:80", "give a token="),
            ({"host": "10.1.2.3"}, "give a token="),
            ({"host": "10.1.2.3", "token": ""}, "token=...: 1 to 512"),
            ({"token": "two words"}, "token=...: 1 to 512"),
            ({"token": "a\r\nb"}, "token=...: 1 to 512"),
            ({"port": 65536}, "port=65536"),
            ({"port": -1}, "port=-1"),
            ({"port": "80"}, "port='80'"),
            ({"host": "a b"}, "host='a b'"),
            ({"host": ""}, "host=''"),
            ({"hots": "x"}, "no option 'hots'; it has host, port, token"),
            ("127.0.0.1", "'HOST:PORT', a Control, or a mapping"),
            ("127.0.0.1:http", "'HOST:PORT'"),
            (8765, "'HOST:PORT'"),
            (True, "'HOST:PORT'"),
        ],
    )
    def test_what_is_wrong_or_not_safe_is_refused(self, given: Any, why: str) -> None:
        for build in (
            lambda: PipelineOptions(directory="a", control=given),
            lambda: PipelineOptions.of({"directory": "a", "control": given}),
            lambda: pipeline(directory="a", control=given),
            lambda: ReplayBuffer(5, directory="a", control=given),
            lambda: TrajectoryBuffer(directory="a", control=given),
        ):
            with pytest.raises(ConfigError) as caught:
                build()
            assert why in str(caught.value)
            assert caught.value.option == "control"

    def test_without_a_folder_there_is_nothing_to_save(self) -> None:
        for build in (
            lambda: PipelineOptions(control="127.0.0.1:0"),
            lambda: ReplayBuffer(5, control="127.0.0.1:0"),
        ):
            with pytest.raises(ConfigError, match=r"control=.*directory"):
                build()

    def test_nothing_listens_unless_it_is_asked_for(self) -> None:
        with capture_logs() as logs:
            assert pipeline()._run.control.server is None
        assert not logs
