/* What programs do to their own process, by accident or on purpose, before they allocate:
 *
 *     conditions WAY
 *
 * prints how many blocks of 64 MiB it got until it was refused, and how many once it had freed them; then waits until its
 * input ends. Programs of several threads or processes say so in a word, and what else they found.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK ((size_t)64 << 20)
#define BLOCKS 64
#define THREADS 2000
#define FORKS 100

typedef unsigned long long address_t;
static int (*mem_alloc)(address_t *, size_t), (*mem_free)(address_t), (*set_current)(void *), (*mem_info)(size_t *, size_t *);
static int (*mem_alloc_async)(address_t *, size_t, void *);
static void *context;
static _Atomic int granted, odd;
static _Atomic bool over;

static void *find(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    return found ? found : (exit(2), NULL);
}

static void start(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&mem_alloc = find(driver, "cuMemAlloc_v2");
    *(void **)&mem_free = find(driver, "cuMemFree_v2");
    *(void **)&mem_alloc_async = find(driver, "cuMemAllocAsync");
    *(void **)&mem_info = find(driver, "cuMemGetInfo_v2");
    *(void **)&set_current = find(driver, "cuCtxSetCurrent");
    if (((int (*)(unsigned))find(driver, "cuInit"))(0) ||
        ((int (*)(void **, int))find(driver, "cuDevicePrimaryCtxRetain"))(&context, 0) || set_current(context))
        exit(3);
}

static int take_and_free(bool keep)
{
    static address_t blocks[BLOCKS];
    int count = 0;
    while (count < BLOCKS && mem_alloc(&blocks[count], BLOCK) == 0)
        count++;
    for (int i = 0; i < count && !keep; i++)
        odd += mem_free(blocks[i]) != 0;
    return count;
}

/* ---- conditions ---- */

static void limit(int resource, rlim_t most)
{
    struct rlimit of = {most, most};
    if (setrlimit(resource, &of))
        exit(4);
}

static void close_everything(void) { syscall(SYS_close_range, 3, ~0u, 0); }
static void no_descriptors(void) { limit(RLIMIT_NOFILE, 0); }
static void no_files(void) { limit(RLIMIT_FSIZE, 0); }
static void another_user(void)
{
    if (setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534))
        exit(77);
}
static void another_root(void)
{
    if (chroot("/proc/self/fdinfo") || chdir("/"))
        exit(77);
}

/* As a sandbox that answers: each call that only we make. */
static void no_calls(void)
{
    static const int forbidden[] = {SYS_openat, SYS_newfstatat, SYS_fstat,        SYS_readlinkat, SYS_kill,
                                    SYS_fcntl,  SYS_flock,      SYS_sched_yield,  SYS_nanosleep,  SYS_ftruncate,
                                    SYS_fchmod, SYS_getpid,     SYS_clock_gettime};
    enum { COUNT = sizeof forbidden / sizeof forbidden[0] };
    struct sock_filter code[COUNT + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (unsigned i = 0; i < COUNT; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)forbidden[i], COUNT - i, 0);
    code[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    struct sock_fprog program = {COUNT + 3, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        exit(77);
}

static void on_alarm(int signal) { (void)signal; }

static void signals(void)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval every = {{0, 100}, {0, 100}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
}

static void take_at_the_end(void) { printf("at the end %d\n", take_and_free(false)); }

static void nothing(void) {}

static const struct {
    const char *name;
    void (*before)(void), (*after)(void); /* the driver was found */
} ways[] = {{"plain", nothing, nothing},
            {"descriptors closed", nothing, close_everything},
            {"no descriptors", nothing, no_descriptors},
            {"no file sizes", no_files, nothing},
            {"another user", nothing, another_user},
            {"another root", nothing, another_root},
            {"no calls", nothing, no_calls},
            {"signals", nothing, signals}};

/* ---- many at once ---- */

static pthread_barrier_t all;

static void *take_one(void *unused)
{
    address_t block;
    bool has = set_current(context) == 0 && mem_alloc(&block, BLOCK) == 0;
    granted += has;
    pthread_barrier_wait(&all); /* as many as ever */
    odd += has && mem_free(block) != 0;
    return unused;
}

static void many_threads(void)
{
    static pthread_t threads[THREADS];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    pthread_barrier_init(&all, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], &small, take_one, NULL))
            exit(77);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%d odd %d\n", granted, odd);
}

static void *churn(void *unused)
{
    address_t block;
    set_current(context);
    while (!over)
        odd += mem_alloc(&block, BLOCK) == 0 && mem_free(block) != 0;
    return unused;
}

/* A child of a process with a context can do nothing on the card. It comes to an end all the same. */
static void forks(void)
{
    pthread_t threads[4];
    int status, failed = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, churn, NULL);
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        if (child == 0) {
            address_t block;
            size_t free_bytes, total;
            alarm(60);
            bool any = mem_info(&free_bytes, &total) == 0 || mem_alloc(&block, BLOCK) == 0;
            _exit(any);
        }
        waitpid(child, &status, 0);
        failed += status != 0;
    }
    over = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("%d failed %d odd %d\n", take_and_free(false), failed, odd);
}

static int in_the_same_memory(void *unused)
{
    (void)unused;
    granted = set_current(context) == 0 ? take_and_free(true) : -1;
    return 0;
}

/* Neither a thread nor a fork: another process, the same memory. */
static void shared_memory(void)
{
    static char stack[1 << 20] __attribute__((aligned(16)));
    int status, child = clone(in_the_same_memory, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, NULL);
    waitpid(child, &status, 0);
    printf("%d then %d\n", granted, take_and_free(false));
}

/* ---- out of a wait ---- */

static volatile int handled = -1;
static sigjmp_buf before;

static void calls(int signal)
{
    address_t block;
    (void)signal;
    handled = mem_alloc(&block, BLOCK);
}

static void jumps(int signal)
{
    (void)signal;
    siglongjmp(before, 1);
}

static void interrupted(void (*handler)(int))
{
    address_t block;
    struct sigaction action = {.sa_handler = handler};
    struct itimerval once = {{0, 0}, {0, 100000}};
    sigaction(SIGALRM, &action, NULL);
    if (sigsetjmp(before, 1) == 0)
        setitimer(ITIMER_REAL, &once, NULL);
    int result = mem_alloc(&block, BLOCK);
    printf("%d handled %d\n", result, handled);
}

/* ---- a pool beside a wait ---- */

static void *take_much(void *result)
{
    address_t block;
    set_current(context);
    *(int *)result = mem_alloc_async(&block, BLOCK, NULL);
    over = true;
    return NULL;
}

/* The pool has room for what is small. */
static void small_beside_large(void)
{
    pthread_t thread;
    address_t block;
    int large = -1, small = mem_alloc_async(&block, 1 << 20, NULL);
    pthread_create(&thread, NULL, take_much, &large);
    usleep(200000);
    for (int i = 0; i < 10 && !small; i++)
        small = mem_alloc_async(&block, 1 << 20, NULL);
    bool late = over;
    pthread_join(thread, NULL);
    printf("%d and %d, %s\n", small, large, late ? "late" : "meanwhile");
}

int main(int count, char **arguments)
{
    const char *way = count > 1 ? arguments[1] : "plain";
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        if (strcmp(way, ways[i].name))
            continue;
        ways[i].before();
        start();
        ways[i].after();
        int first = take_and_free(false), second = take_and_free(false);
        printf("%d %d odd %d\n", first, second, odd);
        getchar();
        return 0;
    }
    if (strcmp(way, "at the end") == 0)
        atexit(take_at_the_end);
    start();
    if (strcmp(way, "many threads") == 0)
        many_threads();
    else if (strcmp(way, "forks") == 0)
        forks();
    else if (strcmp(way, "shared memory") == 0)
        shared_memory();
    else if (strcmp(way, "small beside large") == 0)
        small_beside_large();
    else if (strcmp(way, "a handler that calls") == 0)
        interrupted(calls);
    else if (strcmp(way, "a handler that jumps") == 0)
        interrupted(jumps);
    return 0;
}
