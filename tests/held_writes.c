/* For LD_PRELOAD: a process waits at named points of the write of an unfinished file, whose name has a `#`.
 *
 * The folder HELD_POINTS says where: at the point `made` (the file was made), `half` (half of its bytes were written), `whole`
 * (all were) and `renamed`, a process that finds a file of this name there writes `<name>.in`, and goes on once the file is gone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int (*real_open)(const char *, int, ...);
static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_rename)(const char *, const char *);

static int is_held(const char *point, char *path, size_t size)
{
    const char *folder = getenv("HELD_POINTS");
    if (folder == NULL)
        return 0;
    snprintf(path, size, "%s/%s", folder, point);
    return access(path, F_OK) == 0;
}

static void hold(const char *point)
{
    char path[4096], told[4200];
    if (!is_held(point, path, sizeof path))
        return;
    snprintf(told, sizeof told, "%s.in", path);
    close(real_open(told, O_WRONLY | O_CREAT, 0600));
    while (access(path, F_OK) == 0)
        usleep(5000);
}

static int is_unfinished(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return path[0] == '/' && strchr(path, '#') != NULL;
}

__attribute__((constructor)) static void find_real(void)
{
    *(void **)&real_open = dlsym(RTLD_NEXT, "open64");
    *(void **)&real_write = dlsym(RTLD_NEXT, "write");
    *(void **)&real_rename = dlsym(RTLD_NEXT, "rename");
}

int open64(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    int file = real_open(path, flags, mode);
    if (file >= 0 && (flags & O_CREAT) && strchr(path, '#') != NULL)
        hold("made");
    return file;
}

ssize_t write(int file, const void *bytes, size_t size)
{
    char path[4096];
    if (!is_unfinished(file))
        return real_write(file, bytes, size);
    if (size > 1 && is_held("half", path, sizeof path)) {
        ssize_t written = real_write(file, bytes, size / 2);
        hold("half");
        return written;
    }
    ssize_t written = real_write(file, bytes, size);
    if (written == (ssize_t)size)
        hold("whole");
    return written;
}

int rename(const char *from, const char *to)
{
    int status = real_rename(from, to);
    if (status == 0 && strchr(from, '#') != NULL)
        hold("renamed");
    return status;
}
