# The simulated driver: libcuda.so.1, libnvidia-ml.so.1, nvidia-smi and the workload programs.
SIM_DIR := $(dir $(lastword $(MAKEFILE_LIST)))
SIM_BUILD := $(BUILD)/sim
SIM_OBJECTS := $(BUILD)/obj/sim
SIM_CFLAGS := $(CFLAGS) -D_GNU_SOURCE -fPIC -fvisibility=hidden
# -Bsymbolic: calls and addresses inside the driver never lead out of it, whatever is preloaded.
SIM_LDFLAGS := $(LDFLAGS) -shared -Wl,-Bsymbolic -Wl,-z,defs

sim_objects = $(patsubst $(SIM_DIR)%.c,$(SIM_OBJECTS)/%.o,$(sort $(wildcard $(addprefix $(SIM_DIR),$(1)))))

SIM_STATE := $(call sim_objects,state/*.c)
SIM_CUDA := $(SIM_STATE) $(filter-out %/future.o,$(call sim_objects,libcuda/*.c))
# The same driver with newer forms of some functions than anybody knows.
SIM_FUTURE := $(filter-out %/symbols.o,$(SIM_CUDA)) $(SIM_OBJECTS)/libcuda/future.o $(SIM_OBJECTS)/libcuda/symbols_future.o
SIM_NVML := $(SIM_STATE) $(call sim_objects,libnvml/*.c)
SIM_TARGETS := $(addprefix $(SIM_BUILD)/,libcuda.so.1 libcuda.so libnvidia-ml.so.1 libnvidia-ml.so nvidia-smi \
  libsimnet.so cuda_malloc cuda_malloc_static storm layout cudart.o cudart_per_thread.o \
  future/libcuda.so.1 $(foreach folder,stubs compat older second,$(folder)/libcuda.so.1) \
  $(foreach folder,stubs older second,$(folder)/libnvidia-ml.so.1))

all: sim
sim: $(SIM_TARGETS)

$(SIM_OBJECTS)/%.o: $(SIM_DIR)%.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -MMD -MP -c $< -o $@

$(SIM_BUILD)/libcuda.so.1: $(SIM_CUDA)
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,libcuda.so.1 $^ -o $@ -lpthread

$(SIM_OBJECTS)/libcuda/symbols_future.o: $(SIM_DIR)libcuda/symbols.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -DSIM_FUTURE -MMD -MP -c $< -o $@

$(SIM_BUILD)/future/libcuda.so.1: $(SIM_FUTURE)
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,libcuda.so.1 $^ -o $@ -lpthread

$(SIM_BUILD)/libsimnet.so: $(call sim_objects,network/*.c)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) -shared $^ -o $@ -ldl

$(SIM_BUILD)/libnvidia-ml.so.1: $(SIM_NVML)
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,libnvidia-ml.so.1 $^ -o $@ -lpthread

# What else a program may find by these names: the toolkit's stubs, copies that do not fit the kernel module, and the
# driver once more by another path.
$(SIM_OBJECTS)/misfit/compat.o: SIM_CFLAGS += -DSIM_MISFIT=803 -DSIM_MISFIT_VERSION=13050
$(SIM_OBJECTS)/misfit/older.o: SIM_CFLAGS += -DSIM_MISFIT=803 -DSIM_MISFIT_VERSION=11040
$(SIM_OBJECTS)/misfit/compat.o $(SIM_OBJECTS)/misfit/older.o: $(SIM_DIR)libcuda/init.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -MMD -MP -c $< -o $@

$(SIM_OBJECTS)/misfit/older_nvml.o: $(SIM_DIR)libnvml/system.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -DSIM_NVML_VERSION='"470.57.02"' -MMD -MP -c $< -o $@

$(SIM_BUILD)/compat/libcuda.so.1 $(SIM_BUILD)/older/libcuda.so.1: $(SIM_BUILD)/%/libcuda.so.1: \
  $(filter-out %/libcuda/init.o,$(SIM_CUDA)) $(SIM_OBJECTS)/misfit/%.o
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,libcuda.so.1 $^ -o $@ -lpthread

$(SIM_BUILD)/older/libnvidia-ml.so.1: $(filter-out %/libnvml/system.o,$(SIM_NVML)) $(SIM_OBJECTS)/misfit/older_nvml.o
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,libnvidia-ml.so.1 $^ -o $@ -lpthread

$(SIM_BUILD)/stubs/libcuda.so.1: $(SIM_OBJECTS)/candidates/cuda_stub.o
$(SIM_BUILD)/stubs/libnvidia-ml.so.1: $(SIM_OBJECTS)/candidates/nvml_stub.o
$(SIM_BUILD)/stubs/%:
	@mkdir -p $(@D)
	@$(CC) $(SIM_LDFLAGS) -Wl,-soname,$* $^ -o $@

$(SIM_BUILD)/second/%: $(SIM_BUILD)/%
	@mkdir -p $(@D)
	@cp $< $@

$(SIM_BUILD)/lib%.so: $(SIM_BUILD)/lib%.so.1
	@ln -sf $(<F) $@

# Programs find the libraries by name beside themselves, or wherever LD_LIBRARY_PATH says first.
$(SIM_BUILD)/nvidia-smi: $(call sim_objects,programs/nvidia_smi*.c)
	@$(CC) $(LDFLAGS) $^ -o $@ -Wl,-rpath,'$$ORIGIN' -ldl

$(SIM_BUILD)/cuda_malloc $(SIM_BUILD)/storm: $(SIM_BUILD)/%: $(SIM_OBJECTS)/programs/%.o $(SIM_BUILD)/libcuda.so.1
	@$(CC) $(LDFLAGS) $< -o $@ -Wl,-rpath,'$$ORIGIN' -L$(SIM_BUILD) -l:libcuda.so.1 -lpthread

# What no preloaded library is ever in: a program that brings its own way to the kernel's driver. Of sources: sanitizers are for
# shared objects.
$(SIM_BUILD)/cuda_malloc_static: $(patsubst $(SIM_OBJECTS)/%.o,$(SIM_DIR)%.c,$(SIM_OBJECTS)/programs/cuda_malloc.o $(SIM_CUDA))
	@$(CC) $(filter-out -fsanitize%,$(SIM_CFLAGS)) -static $^ -o $@ -lpthread

# The small runtime, to be linked into programs of `nvcc -cudart none`.
$(SIM_BUILD)/cudart.o: $(SIM_DIR)cudart/cudart.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -c $< -o $@

$(SIM_BUILD)/cudart_per_thread.o: $(SIM_DIR)cudart/cudart.c
	@mkdir -p $(@D)
	@$(CC) $(SIM_CFLAGS) -DCUDART_PER_THREAD -c $< -o $@

$(SIM_BUILD)/layout: $(call sim_objects,programs/layout.c)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $^ -o $@

-include $(shell find $(SIM_OBJECTS) -name '*.d' 2>/dev/null)

.PHONY: sim
