"""Makes a language model of 120,000 parameters that knows one thing: to call two tools, and to say what they told it.

    python examples/tiny_model.py FOLDER [--steps 800] [--gguf FILE]

Needs torch and transformers, and for ``--gguf`` the package gguf. Its tokens are bytes. It is trained for a minute on
talks that are made up here, such as a person, a call of ``calculate``, the result, a reply; it knows no language, and
will make calls of whatever it is told. It is there so that ``examples/tool_agent.py`` has a real model to talk to where
there is no network and no accelerator.
"""

import argparse
import json
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with calls of tools as Qwen writes them. It says nothing of the tools that there are: the model knows two."""
CITIES = {
    "Ada": "Bern",
    "Bob": "Oslo",
    "Eve": "Rome",
    "Kim": "Lima",
    "Leo": "Kyiv",
    "Mia": "Baku",
    "Tom": "Doha",
    "Zoe": "Riga",
}


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def talk(question, called, result):
    return [
        {"role": "user", "content": question},
        called,
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result.split()[-1].rstrip(".")},
    ]


def talks():
    """All sums of two digits, and as many talks about people."""
    for a in range(1, 10):
        for b in range(1, 10):
            for sign in "+-*":
                sum_ = f"{a}{sign}{b}"
                yield talk(f"what is {sum_}?", call("calculate", expression=sum_), str(eval(sum_)))
    for name in [*CITIES] * 30:
        yield talk(f"where is {name}?", call("search", words=name), f"{name} lives in {CITIES[name]}.")


def make_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(letters)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    made.chat_template = TEMPLATE
    return made


def lines(tokenizer, talk):
    """The tokens of a talk, and those that the model has to say; -100 for the others."""
    ids: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(talk):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(talk[:number], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(talk[: number + 1], tokenize=False)
            prompt = tokenizer.encode(before)[len(ids) :]
            reply = tokenizer.encode(after[len(before) :].rstrip("\n"))
            ids += prompt + reply
            labels += [-100] * len(prompt) + reply
    return torch.tensor(ids), torch.tensor(labels)


def train(model, tokenizer, steps):
    """Teach the replies; say how it goes."""
    rows = [lines(tokenizer, each) for each in talks()]
    ids = pad_sequence([each for each, _ in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence([each for _, each in rows], batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(rows), (16,))
        loss = model(input_ids=ids[chosen], labels=labels[chosen]).loss  # padding comes last, and nothing looks ahead
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - begun:.0f} s", flush=True)


def write_gguf(model, tokenizer, path):
    """Write it for llama.cpp."""
    import gguf

    config = model.config
    out = gguf.GGUFWriter(path, "qwen2")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    tokens = [tokenizer.convert_ids_to_tokens(at) for at in range(len(tokenizer))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if each in SPECIAL else gguf.TokenType.NORMAL for each in tokens]
    out.add_token_types(kinds)
    out.add_token_merges(["\u0100 \u0100"])  # one has to be there: of two NULs, which is no token, so they stay two
    out.add_eos_token_id(tokenizer.eos_token_id)
    out.add_pad_token_id(tokenizer.pad_token_id)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, each in model.state_dict().items():
        if name != "lm_head.weight":  # it is the embedding
            out.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), each.float().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main(folder, steps, seed, gguf_file):
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small a model gains nothing by more
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 numbers: on a CPU vLLM has no smaller ones
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, to be trained for {steps} steps")
    train(model, tokenizer, steps)
    model.generation_config.do_sample = True
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if gguf_file:
        write_gguf(model, tokenizer, gguf_file)
    print(f"written: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf")
    given = parser.parse_args()
    main(given.folder, given.steps, given.seed, given.gguf)
