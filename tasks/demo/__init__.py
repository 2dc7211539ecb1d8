"""The demo: CartPole trained from asynchronous rollouts, killed half way, and resumed."""
