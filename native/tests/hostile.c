/* A tenant's program that takes device memory past libgpuslice, and holds it until its input ends:
 *
 *     hostile WAY BYTES
 *
 *     plain       as any program: for where the library is not (linked statically, mounts of its own, musl)
 *     lookup      finds the driver's functions in its file's symbol table itself
 *     namespace   the same, in a second copy of the driver, loaded by dlmopen
 *     asked       in that copy too, but found by dlsym: which the library answers
 *     patch       writes over the library's code in its own memory, as a debugger would
 *     table       by a function of a private table, of which cuGetExportTable tells nothing; then sets a limit, so that
 *                 the library measures
 *     unasked     plain, started where the loader is told that there is no preload file, by a seccomp filter
 *     launch      no memory: launches kernels for BYTES milliseconds by a private table
 *
 * Says "taken", "error N" or what it could not find.
 */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int (*function)();

static const char *way;

#ifdef LINKED
int cuInit(), cuDevicePrimaryCtxRetain(), cuCtxSetCurrent(), cuMemAlloc_v2();
static function find(const char *symbol)
{
    return strcmp(symbol, "cuInit") == 0                     ? (function)cuInit
           : strcmp(symbol, "cuDevicePrimaryCtxRetain") == 0 ? (function)cuDevicePrimaryCtxRetain
           : strcmp(symbol, "cuCtxSetCurrent") == 0          ? (function)cuCtxSetCurrent
                                                             : (function)cuMemAlloc_v2;
}
#else

static void *open_driver(void)
{
    static void *driver;
    if (!driver)
        driver = strcmp(way, "namespace") == 0 || strcmp(way, "asked") == 0 ? dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW)
                                                                            : dlopen("libcuda.so.1", RTLD_NOW);
    return driver;
}

static const Elf64_Shdr *section(const char *file, Elf64_Word type)
{
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)file;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type == type)
            return &sections[i];
    return NULL;
}

static const char *mapped(const char *path)
{
    struct stat about;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &about))
        return NULL;
    const char *content = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    return content == MAP_FAILED ? NULL : content;
}

static function look_up(const struct link_map *library, const char *symbol)
{
    const char *file = mapped(library->l_name);
    const Elf64_Shdr *table = file ? section(file, SHT_DYNSYM) : NULL;
    if (!table)
        return NULL;
    const Elf64_Shdr *names = (const Elf64_Shdr *)(file + ((const Elf64_Ehdr *)file)->e_shoff) + table->sh_link;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(file + table->sh_offset);
    for (size_t i = 0; i < table->sh_size / sizeof *symbols; i++)
        if (symbols[i].st_shndx && strcmp(file + names->sh_offset + symbols[i].st_name, symbol) == 0)
            return (function)(library->l_addr + symbols[i].st_value);
    return NULL;
}

static function of_the_file(const char *symbol)
{
    struct link_map *library;
    void *driver = open_driver();
    return driver && dlinfo(driver, RTLD_DI_LINKMAP, &library) == 0 ? look_up(library, symbol) : NULL;
}

static function find(const char *symbol)
{
    if (strcmp(way, "lookup") == 0 || strcmp(way, "namespace") == 0)
        return of_the_file(symbol);
    return open_driver() ? (function)dlsym(open_driver(), symbol) : NULL;
}

/* A jump to the driver's function at the beginning of what dlsym gives for it. The kernel writes it for us,
 * whatever the pages' protection: by that file, as by ptrace from another process. */
static int patch(const char *symbol)
{
    function target = of_the_file(symbol), hook = find(symbol);
#ifdef __x86_64__
    unsigned char code[] = {0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xe3}; /* movabs $target, %r11; jmp *%r11 */
    memcpy(code + 2, &target, sizeof target);
#else
    unsigned char code[] = {0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6, 0, 0, 0, 0, 0, 0, 0, 0}; /* ldr x16, .+8; br x16 */
    memcpy(code + 8, &target, sizeof target);
#endif
    int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    ssize_t done = pwrite(memory, code, sizeof code, (off_t)(uintptr_t)hook);
    close(memory);
    return done == (ssize_t)sizeof code ? 0 : -1;
}
#endif

/* The first word of a table is its size; the functions follow. */
static function entry_of(const char *id, int number)
{
    const void *table = NULL;
    function ask = find("cuGetExportTable");
    return ask && ask(&table, id) == 0 ? ((const function *)table)[1 + number] : NULL;
}

/* Of the simulated driver: what stands for the unknown ones of a real one. */
static const char allocating[] = "gpusim: memory 1";
static const char launching[16] = {0x6b,       (char)0xd5, (char)0xfb, 0x6c, 0x5b, (char)0xf4, (char)0xe7, 0x4a,
                                   (char)0x89, (char)0x87, (char)0xd9, 0x39, 0x12, (char)0xfd, (char)0x9d, (char)0xf9};

static int start(void)
{
    void *context;
    function begin = find("cuInit"), retain = find("cuDevicePrimaryCtxRetain"), set = find("cuCtxSetCurrent");
    if (!begin || !retain || !set)
        return -1;
    int result = begin(0);
    if (!result)
        result = retain(&context, 0);
    return result ? result : set(context);
}

enum { HEAP = 2 };

static int take_by_table(size_t bytes)
{
    unsigned long long address;
    function allocate = entry_of(allocating, 0), set_limit = find("cuCtxSetLimit");
    int result = allocate && set_limit ? allocate(&address, bytes) : -1;
    if (!result)
        set_limit(HEAP, (size_t)16 << 20);
    return result;
}

static int take(size_t bytes)
{
    unsigned long long address;
    if (strcmp(way, "table") == 0)
        return take_by_table(bytes);
#ifndef LINKED
    if (strcmp(way, "patch") == 0 && patch("cuMemAlloc_v2"))
        return -1;
#endif
    function allocate = find("cuMemAlloc_v2");
    return allocate ? allocate(&address, bytes) : -1;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int launch(double for_s)
{
    static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry work() { ret; }\n";
    void *module, *work;
    function load = find("cuModuleLoadData"), get = find("cuModuleGetFunction"), wait = find("cuCtxSynchronize");
    function run = entry_of(launching, 8);
    if (!load || !get || !wait || !run || load(&module, image) || get(&work, module, "work"))
        return -1;
    for (double until = seconds() + for_s; seconds() < until;) {
        int result = run(work, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
        if (result || wait())
            return result ? result : -1;
    }
    return 0;
}

/* Starts the program again as "plain". glibc's loader asks by access() whether the file exists, and nothing else. */
static void start_unasked(char **arguments)
{
#ifdef SYS_access
    const unsigned asked = SYS_access;
#else
    const unsigned asked = SYS_faccessat;
#endif
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, asked, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOENT),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0)
        execl(arguments[0], arguments[0], "plain", arguments[2], (char *)NULL);
}

int main(int count, char **arguments)
{
    way = count > 1 ? arguments[1] : "plain";
    unsigned long long amount = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    if (count > 2 && strcmp(way, "unasked") == 0)
        start_unasked(arguments);
    int result = start();
    if (!result)
        result = strcmp(way, "launch") == 0 ? launch((double)amount / 1000) : take(amount);
    if (result == 0)
        puts("taken");
    else
        printf(result == -1 ? "not found\n" : "error %d\n", result);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return result != 0;
}
