# Programs for the tests of libgpuslice. Linked against the simulated driver; nothing here is installed.
TEST_BUILD := $(BUILD)/tests
TEST_CFLAGS := $(CFLAGS) -Iinclude -Wno-pedantic

tests: $(addprefix $(TEST_BUILD)/,worker linked_worker plug.so early.so region_layout)

$(TEST_BUILD)/worker: tests/worker.c src/hooks.def src/driver_abi.h
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $< -ldl -lpthread

$(TEST_BUILD)/linked_worker: tests/worker.c src/hooks.def src/driver_abi.h $(BUILD)/sim/libcuda.so.1
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $< -Wl,--no-as-needed -L$(BUILD)/sim -l:libcuda.so.1 -ldl -lpthread

$(TEST_BUILD)/%.so: tests/%.c src/hooks.def $(BUILD)/sim/libcuda.so.1
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) -fPIC -shared $(LDFLAGS) -o $@ $< -Wl,--no-as-needed -L$(BUILD)/sim -l:libcuda.so.1

$(TEST_BUILD)/region_layout: tests/region_layout.c include/region.h
	@mkdir -p $(@D)
	@$(CC) $(TEST_CFLAGS) $(LDFLAGS) -o $@ $<

all: tests
.PHONY: tests
