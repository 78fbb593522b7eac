"""A card, its containers and what they launch, in virtual time: how shares are kept on a quiet machine.

The arithmetic is the library's own (`native/src/policy/share.c`, through ctypes). What stands around it in
`throttle.c` is told again in `throttle`; so is the card, in `card`. All times are nanoseconds.
"""
