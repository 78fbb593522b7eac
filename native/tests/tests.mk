# Programs for the tests of libgpuslice. Linked against the simulated driver; nothing here is installed.
TEST_BUILD := $(BUILD)/tests
TEST_CFLAGS := $(CFLAGS) -Iinclude -Isrc -Wno-pedantic

tests: $(addprefix $(TEST_BUILD)/,worker linked_worker plug.so early.so refusing.so holding.so region_layout hostile comings conditions clocked)

$(TEST_BUILD)/worker: tests/worker.c src/driver/hooks.def src/driver/driver_abi.h
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $< -ldl -lpthread

$(TEST_BUILD)/linked_worker: tests/worker.c src/driver/hooks.def src/driver/driver_abi.h $(BUILD)/sim/libcuda.so.1
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $< -Wl,--no-as-needed -L$(BUILD)/sim -l:libcuda.so.1 -ldl -lpthread

$(TEST_BUILD)/%.so: tests/%.c src/driver/hooks.def $(BUILD)/sim/libcuda.so.1
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) -fPIC -shared $(LDFLAGS) -o $@ $< -Wl,--no-as-needed -L$(BUILD)/sim -l:libcuda.so.1

# Old-style declarations: a program that has no header of the driver's.
HOSTILE_CFLAGS := $(TEST_CFLAGS) -D_GNU_SOURCE -Wno-strict-prototypes -Wno-unknown-warning-option
$(addprefix $(TEST_BUILD)/,hostile comings clocked): $(TEST_BUILD)/%: tests/%.c
	@mkdir -p $(@D)
	@$(CC) $(HOSTILE_CFLAGS) $(LDFLAGS) -o $@ $< -ldl -lpthread

# Where there is a libc to link statically.
tests: $(if $(wildcard $(shell $(CC) -print-file-name=libc.a)),$(TEST_BUILD)/hostile_static)

# With a driver of its own in it and no loader, as a program that speaks to the devices itself. Of sources: sanitizers are
# for shared objects.
$(TEST_BUILD)/hostile_static: tests/hostile.c $(wildcard sim/state/*.[ch] sim/libcuda/*.[ch] sim/libcuda/*.def)
	@mkdir -p $(@D)
	@$(CC) $(filter-out -fsanitize=%,$(HOSTILE_CFLAGS)) -DLINKED -static -o $@ $(filter %.c,$^) -lpthread

$(TEST_BUILD)/conditions: tests/conditions.c
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $< -ldl -lpthread

$(TEST_BUILD)/region_layout: tests/region_layout.c include/region.h
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $<

all: tests
.PHONY: tests

# The parts that can be tested without a driver, with their functions visible.
tests: $(TEST_BUILD)/libparts.so
$(TEST_BUILD)/libparts.so: $(addprefix src/,$(addsuffix .c,policy/limits policy/neighbours policy/fairness policy/share system/os \
  system/open_file_locks system/elf system/elf_objects system/table accounts/accounts accounts/attach accounts/exports accounts/in_flight accounts/slots)) \
  $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) -fPIC -shared $(LDFLAGS) -o $@ $(filter %.c,$^)

# Shares in virtual time: a card, and all that throttle.c calls; libthrottle.so is loaded once for each process.
tests: $(TEST_BUILD)/libvirtual.so $(TEST_BUILD)/libthrottle.so
$(TEST_BUILD)/libvirtual.so: $(addprefix tests/,card_model.c virtual_process.c virtual_driver.c throttle_driver.c) \
  $(addprefix src/policy/,share.c fairness.c card_queue.c) tests/card_model.h tests/virtual_process.h tests/throttle_driver.h $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) -fPIC -shared $(LDFLAGS) -Wl,-soname,libvirtual.so -o $@ $(filter %.c,$^) -lm -ldl

$(TEST_BUILD)/libthrottle.so: tests/virtual_launch.c src/policy/throttle.c $(TEST_BUILD)/libvirtual.so
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) -fPIC -shared $(LDFLAGS) -Wl,--wrap=gs_queue_begin,--wrap=gs_queue_is_cleared -Wl,--no-undefined -o $@ \
	  $(filter %.c,$^) -L$(TEST_BUILD) -l:libvirtual.so

STRESSED := $(addprefix src/,$(addsuffix .c,accounts/accounts accounts/attach accounts/exports accounts/in_flight accounts/slots system/table system/os system/open_file_locks system/elf system/elf_objects))
tests: $(TEST_BUILD)/stress
$(TEST_BUILD)/stress: tests/stress.c $(STRESSED) $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c,$^) -lpthread

THROTTLED := tests/throttled.c tests/throttle_driver.c $(addprefix src/policy/,throttle.c card_queue.c fairness.c share.c neighbours.c) $(STRESSED)
# Without our warnings: gcc sees less of what is initialized when it adds this sanitizer's calls.
THREADED := -O1 -g -std=c11 -fsanitize=thread -Iinclude -Isrc
tests: $(if $(findstring /,$(shell $(CC) -print-file-name=libtsan.so)),$(TEST_BUILD)/throttled)
$(TEST_BUILD)/throttled: $(THROTTLED) tests/throttle_driver.h $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(THREADED) -o $@ $(THROTTLED) -lpthread

# With clang and its fuzzer: make fuzz, each target for FUZZ_SECONDS, from the inputs in tests/corpus. Without, a loop of
# its own over the same targets, and the inputs.
FUZZ_SECONDS ?= 20
FUZZED_limits := src/policy/limits.c src/system/os.c src/system/elf.c src/system/elf_objects.c
FUZZED_region := $(STRESSED)
# A script may have nonsense wait for at each of its steps.
FUZZ_CFLAGS := -DGS_CONTENDED_NS=1000000
FUZZ_FLAGS_limits := -max_len=9000 -dict=tests/limits.dict
FUZZ_FLAGS_region := -max_len=1024 -timeout=10
FUZZERS := limits region

tests: $(FUZZERS:%=$(TEST_BUILD)/fuzz_%)
.SECONDEXPANSION:
$(FUZZERS:%=$(TEST_BUILD)/fuzz_%): $(TEST_BUILD)/fuzz_%: tests/fuzz_%.c $$(FUZZED_$$*) $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(FUZZ_CFLAGS) -DSTANDALONE $(LDFLAGS) -o $@ $(filter %.c,$^)

$(FUZZERS:%=$(TEST_BUILD)/fuzz_%_clang): $(TEST_BUILD)/fuzz_%_clang: tests/fuzz_%.c $$(FUZZED_$$*) $(SLICE_HEADERS)
	@mkdir -p $(@D)
	@clang -g -O1 -std=c11 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Iinclude -Isrc $(FUZZ_CFLAGS) -o $@ \
	  $(filter %.c,$^)

fuzz: $(FUZZERS:%=fuzz-%)
$(FUZZERS:%=fuzz-%): fuzz-%: $(TEST_BUILD)/fuzz_%_clang
	@mkdir -p $(TEST_BUILD)/corpus_$*
	$< -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 $(FUZZ_FLAGS_$*) $(TEST_BUILD)/corpus_$* tests/corpus/$*

.PHONY: fuzz $(FUZZERS:%=fuzz-%)

# The same tests on a build with AddressSanitizer and UBSan, whose runtimes come first in LD_PRELOAD, because that is how
# the library itself gets into a program; and the accounts, the table and the throttle by themselves with ThreadSanitizer.
PYTEST ?= ../.venv/bin/python -m pytest -q -p no:unraisableexception
SANITIZED_TESTS ?= $(addprefix ../tests/integration/test_,$(addprefix isolation_,memory.py figures.py driver.py entry.py storm.py \
  conformance.py damage.py kept.py loans.py in_flight.py parts.py bypass.py share.py streams.py surroundings.py descriptors.py) \
  frameworks.py sequences.py)
runtime = $(shell $(CC) -print-file-name=lib$(1).so):

check-sanitized: sanitize
	GPUSLICE_NATIVE_BUILD=$(abspath build/sanitize) GPUSLICE_TEST_SANITIZER=$(call runtime,asan)$(call runtime,ubsan) \
	  $(PYTEST) $(SANITIZED_TESTS)

check-threads: $(TEST_BUILD)/throttled
	@mkdir -p $(BUILD)/threads
	$(CC) $(THREADED) -o $(BUILD)/threads/stress tests/stress.c $(STRESSED) -lpthread
	rm -rf $(BUILD)/threads/region $(BUILD)/threads/meeting
	mkdir $(BUILD)/threads/meeting
	TSAN_OPTIONS=exitcode=66 $(BUILD)/threads/stress $(BUILD)/threads/region 2 4 2000
	TSAN_OPTIONS=exitcode=66 $(TEST_BUILD)/throttled $(BUILD)/threads/meeting 20000

.PHONY: check-sanitized check-threads
