/* The OCI hook `createRuntime` of containers whose limits the driver enforces: has the agent set them before the container's
 * first instruction, or fails its start.
 *
 *   gpuslice-limits-hook SOCKET NAME < state.json
 *
 * It is the container runtime's child on the host, of which nothing is known: any libc, the driver's libraries anywhere or
 * in a container (/run/nvidia/driver). So it is static and calls no driver: a static program that opens libnvidia-ml.so.1
 * needs the very glibc it was linked with. It passes on the state that it is given; the agent, which has NVML open and
 * without which no container of ours starts anyway, knows the limits and answers "ok" or why not. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { STATE_BYTES = 1 << 16, ANSWER_BYTES = 1024, TRIES = 100, PATIENCE_S = 20 };

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "gpuslice: %s: %s\n", what, why);
    return 1;
}

/* Up to the end; -1 if that fails or there is more than fits. */
static ssize_t read_all(int file, char *to, size_t room)
{
    size_t length = 0;
    while (length < room) {
        ssize_t count = read(file, to + length, room - length);
        if (count == 0)
            return (ssize_t)length;
        if (count < 0 && errno != EINTR)
            return -1;
        length += count > 0 ? (size_t)count : 0;
    }
    return -1;
}

static int write_all(int file, const char *from, size_t length)
{
    while (length) {
        ssize_t count = send(file, from, length, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR)
            return -1;
        from += count > 0 ? count : 0;
        length -= count > 0 ? (size_t)count : 0;
    }
    return 0;
}

/* From the socket's folder, since an address has room for 107 characters. An agent may just be taking over from another. */
static int connect_to(char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char folder[4096];
    if (strlen(path) >= sizeof folder)
        return -1;
    strcpy(folder, path);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", basename(path));
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int tries = 0; server >= 0 && tries < TRIES; tries++) {
        if (chdir(dirname(folder)) == 0 && connect(server, (struct sockaddr *)&address, sizeof address) == 0)
            return server;
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    return -1;
}

int main(int count, char **arguments)
{
    static char state[STATE_BYTES], answer[ANSWER_BYTES];
    if (count != 3)
        return fail("usage", "gpuslice-limits-hook SOCKET NAME < state.json");
    alarm(PATIENCE_S);
    ssize_t length = read_all(STDIN_FILENO, state, sizeof state);
    if (length < 0)
        return fail("the container's state cannot be read", errno ? strerror(errno) : "it is too long");
    int server = connect_to(arguments[1]);
    if (server < 0)
        return fail("the GPU limits cannot be set, the node's agent does not answer", strerror(errno));
    if (write_all(server, arguments[2], strlen(arguments[2])) || write_all(server, "\n", 1) ||
        write_all(server, state, (size_t)length) || shutdown(server, SHUT_WR) ||
        (length = read_all(server, answer, sizeof answer - 1)) < 0)
        return fail("the GPU limits cannot be set, the node's agent went away", strerror(errno));
    answer[length] = '\0';
    return strcmp(answer, "ok\n") == 0 ? 0 : fail("the GPU limits are not set", *answer ? answer : "the node's agent ended");
}
