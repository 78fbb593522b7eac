"""A card, its containers and what they launch, in virtual time: how shares are kept on a quiet machine.

The arithmetic is the library's own (`native/src/policy/share.c`, through ctypes). What stands around it in
`throttle.c` is told again in `native/tests/throttle_model.c`; the card is `card_model.c` beside it. What the
programs do is told here. All times are nanoseconds.
"""
