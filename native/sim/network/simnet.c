/* The network of one simulated container, preloaded into its programs: no root, no network namespace. A container listens
 * on a loopback address of its own, and where services and pods really are stands in a table that the simulation writes:
 * `name HOST ADDRESS`, `route ADDRESS PORT REAL_ADDRESS REAL_PORT`; port 0 is every port. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*with_address)(int, const struct sockaddr *, socklen_t);
typedef int (*look_up)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

static FILE *table(void)
{
    const char *path = getenv("SIMCLUSTER_NETWORK");
    return path ? fopen(path, "re") : NULL;
}

/* Where a connection to `address` and `port` really goes; false if the table knows nothing of it. */
static int routed(const struct in_addr *address, in_port_t port, struct sockaddr_in *real)
{
    char line[512], wanted[INET_ADDRSTRLEN], from[64], to[64];
    unsigned from_port, to_port;
    int found = 0;
    FILE *file = table();
    if (!file || !inet_ntop(AF_INET, address, wanted, sizeof wanted))
        return 0;
    while (!found && fgets(line, sizeof line, file)) {
        if (sscanf(line, "route %63s %u %63s %u", from, &from_port, to, &to_port) != 4 || strcmp(from, wanted))
            continue;
        found = !from_port || from_port == ntohs(port);
    }
    fclose(file);
    if (!found)
        return 0;
    memset(real, 0, sizeof *real);
    real->sin_family = AF_INET;
    real->sin_port = to_port ? htons((in_port_t)to_port) : port;
    return inet_pton(AF_INET, to, &real->sin_addr) == 1;
}

EXPORT int connect(int fd, const struct sockaddr *to, socklen_t length)
{
    with_address next = (with_address)dlsym(RTLD_NEXT, "connect");
    const struct sockaddr_in *four = (const struct sockaddr_in *)to;
    struct sockaddr_in real;
    if (to->sa_family == AF_INET && length >= sizeof *four && routed(&four->sin_addr, four->sin_port, &real))
        return next(fd, (const struct sockaddr *)&real, sizeof real);
    return next(fd, to, length);
}

/* "All addresses" are those of this container: one. */
EXPORT int bind(int fd, const struct sockaddr *at, socklen_t length)
{
    with_address next = (with_address)dlsym(RTLD_NEXT, "bind");
    const char *own = getenv("SIMCLUSTER_POD_ADDRESS");
    struct in_addr address;
    if (!own || inet_pton(AF_INET, own, &address) != 1)
        return next(fd, at, length);
    if (at->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in four = *(const struct sockaddr_in *)at;
        if (four.sin_addr.s_addr == htonl(INADDR_ANY)) {
            four.sin_addr = address;
            return next(fd, (const struct sockaddr *)&four, sizeof four);
        }
    }
    if (at->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 six = *(const struct sockaddr_in6 *)at;
        if (IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr)) {
            memset(&six.sin6_addr.s6_addr[10], 0xff, 2); /* ::ffff:a.b.c.d */
            memcpy(&six.sin6_addr.s6_addr[12], &address, sizeof address);
            return next(fd, (const struct sockaddr *)&six, sizeof six);
        }
    }
    return next(fd, at, length);
}

EXPORT int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    look_up next = (look_up)dlsym(RTLD_NEXT, "getaddrinfo");
    char line[512], name[256], address[64];
    FILE *file = host ? table() : NULL;
    const char *asked = host;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "name %255s %63s", name, address) == 2 && !strcmp(name, host)) {
            asked = address;
            break;
        }
    if (file)
        fclose(file);
    return next(asked, service, hints, found);
}
