# The program that a container runtime starts before a container's own: static, so that it runs on any host.
all: $(BUILD)/lib/gpuslice-limits-hook

$(BUILD)/lib/gpuslice-limits-hook: hook/limits_hook.c hook/hook.mk
	@mkdir -p $(@D)
	@$(CC) $(filter-out -fsanitize%,$(CFLAGS)) -D_GNU_SOURCE -static -s -o $@ $<
