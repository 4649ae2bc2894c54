"""The peers' own test suites, run over our faces.

    git clone https://github.com/google-deepmind/jmp
    python -m tests.peers jmp ...

Each PATH is a checkout of a peer's repository, or its folder of tests:

    MPX             github.com/Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX
    JMP             github.com/google-deepmind/jmp
    flashoptim-jax  github.com/samacqua/flashoptim-jax
    jaxamp 0.0.4    github.com/acutkosky/jaxamp

Which peer a PATH belongs to is read from what its tests import. The tests are copied out of the checkout and run by
pytest in a process of their own, where the peer's modules are ours. The exit status is 0 if all tests pass except those
that assert a fault, and those fail:

test_quantization.py::test_round_to_nearest_matches_torch_tie_behavior
    Ties are rounded up, so that -63.5 becomes -63 and 63.5 becomes 64: momenta of both signs drift upwards. Ours go to
    even.
test_amp.py::test_linear_amp
    A layer's float32 result is rounded to float16 at its bias. Ours is the sum in float32, which is nearer to the layer
    in float32.
"""
