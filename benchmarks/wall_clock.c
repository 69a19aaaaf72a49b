/* A wall clock of its own for the processes that preload this library (LD_PRELOAD): the machine's, plus the seconds in
 * the file that WALL_CLOCK_FILE names (an int64). The file is mapped, so that a change is a jump of the clock of all
 * of them at once. Monotonic clocks stay as they are, and so do waits for a monotonic time.
 *
 * libfaketime would do the same, but its clock_nanosleep (0.9.10) returns EINVAL to threads of Python.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t no_offset = 0;
static const volatile int64_t *offset_seconds = &no_offset;

typedef int (*cond_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
typedef int (*sem_wait_until)(sem_t *, const struct timespec *);
static cond_wait real_cond_wait;
static sem_wait_until real_sem_wait;

static void *next(const char *name, const char *version)
{
    void *found = dlvsym(RTLD_NEXT, name, version); /* by default, dlsym may return an older one */
    return found ? found : dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("WALL_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_cond_wait = (cond_wait)next("pthread_cond_timedwait", "GLIBC_2.3.2");
    real_sem_wait = (sem_wait_until)next("sem_timedwait", "GLIBC_2.34");
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset_seconds, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        offset_seconds = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_seconds;
    return status;
}

int gettimeofday(struct timeval *now, void *zone)
{
    int status = (int)syscall(SYS_gettimeofday, now, zone);
    if (!status)
        now->tv_sec += *offset_seconds;
    return status;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

/* The kernel waits until its own wall clock shows a time. Times of monotonic clocks, since the machine started, are small. */
static struct timespec of_the_kernel(const struct timespec *until)
{
    struct timespec found = *until;
    if (found.tv_sec > 1000000000)
        found.tv_sec -= *offset_seconds;
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    struct timespec kernels = of_the_kernel(until);
    return real_cond_wait(condition, mutex, &kernels);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    struct timespec kernels = of_the_kernel(until);
    return real_sem_wait(semaphore, &kernels);
}
