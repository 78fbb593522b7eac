# libgpuslice.so: what containers preload. No dependency but libc, and nothing of it that an old glibc or musl lacks.
# Layers, each of which includes only itself and those before it (tests/unit/test_native_layers.py): the kernel and the loader, the way to the driver,
# the container's accounts, policy (limits, shares, what the driver takes for itself), hooks, and the entry that leads to them.
SLICE_LAYERS := system driver accounts policy hooks entry
SLICE_SOURCES := $(patsubst src/%.c,%,$(wildcard $(SLICE_LAYERS:%=src/%/*.c)))
SLICE_HEADERS := $(wildcard $(SLICE_LAYERS:%=src/%/*.h)) src/driver/hooks.def include/region.h
SLICE_OBJECTS := $(SLICE_SOURCES:%=$(BUILD)/obj/src/%.o)
# On aarch64 gcc otherwise asks the processor once, through a function of libc's that not every musl has.
NO_OUTLINE := $(shell $(CC) -Werror -mno-outline-atomics -E -x c /dev/null > /dev/null 2>&1 && echo -mno-outline-atomics)
# We run on our host's stacks, which may be of 64 KiB, with the driver above us. A sanitizer's frames are larger.
FRAMES := $(if $(findstring -fsanitize,$(CFLAGS)),,-Wframe-larger-than=4608)
# What some distributions' compilers add by themselves needs functions that not every libc has.
PLAIN := -fno-stack-protector -U_FORTIFY_SOURCE
SLICE_CFLAGS := $(PLAIN) -fPIC -fvisibility=hidden -fno-plt -fno-strict-aliasing -Iinclude -Isrc $(NO_OUTLINE) $(FRAMES)
# Nothing names what is called at a fork but its section: no linker is to take it for unused.
SLICE_LDFLAGS := -shared -Wl,--no-gc-sections -Wl,--version-script=src/exports.map -Wl,-soname,libgpuslice.so -Wl,-z,now -Wl,-z,relro -Wl,--no-undefined -Wl,-Bsymbolic

# gcc makes calls of libc's string functions out of loops; clang does not know the option, and does not with -fno-builtin.
NO_PATTERNS := $(shell $(CC) -fno-tree-loop-distribute-patterns -E -x c /dev/null > /dev/null 2>&1 && \
  echo -fno-tree-loop-distribute-patterns)

all: $(BUILD)/lib/libgpuslice.so

$(BUILD)/lib/libgpuslice.so: $(SLICE_OBJECTS) $(BUILD)/obj/exports.ld src/src.mk src/exports.map
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) $(SLICE_LDFLAGS) $(LDFLAGS) -o $@.tmp $(SLICE_OBJECTS) $(BUILD)/obj/exports.ld
	@mv $@.tmp $@

# The driver's names, as symbols of size 0: of a larger one the loader copies the code into a program's variable of that name
# (R_X86_64_COPY), and says on the program's stderr that sizes differ.
$(BUILD)/obj/exports.ld: src/driver/hooks.def src/src.mk
	@mkdir -p $(@D)
	@printf '%s\n' '#define HOOK(library, symbol, ...) symbol = gs_hook_##symbol;' '#define BORROW(...)' '#include "driver/hooks.def"' | \
	  $(CC) -E -P -Isrc -x c - > $@

# In the way of every dlsym: a sanitizer's runtime, say, looks up its symbols before it is ready to watch anybody, and
# stands in front of strcmp.
$(addprefix $(BUILD)/obj/src/,system/elf.o system/elf_objects.o entry/entries.o entry/hook_table.o entry/symbol_lookup.o entry/references.o): SLICE_CFLAGS += -fno-sanitize=all -fno-builtin $(NO_PATTERNS)

$(BUILD)/obj/src/%.o: src/%.c src/src.mk $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) $(SLICE_CFLAGS) -c -o $@ $<
include tests/tests.mk

# Libraries to ship, without debug information: for each architecture that has a compiler at hand. Each serves
# any glibc, and musl too. One built by musl-gcc would not serve glibc: there it keeps programs from starting.
RELEASE_COMPILERS ?= gcc aarch64-linux-gnu-gcc
release:
	@for compiler in $(RELEASE_COMPILERS); do \
	  command -v $$compiler > /dev/null || { echo "skipped: no $$compiler"; continue; }; \
	  $(MAKE) BUILD=build/release/$$compiler CC=$$compiler CFLAGS="-O2" LDFLAGS="-s" \
	    build/release/$$compiler/lib/libgpuslice.so && ls -l build/release/$$compiler/lib/libgpuslice.so || exit 1; \
	done

.PHONY: release
