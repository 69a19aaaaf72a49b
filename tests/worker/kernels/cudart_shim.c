/* Stands for CUDA's runtime in front of FlashInfer's compiled modules, on a machine without a GPU.

   Loaded with LD_PRELOAD. It says that there is an H100, copies at once, and notes launches and kernels' names instead of
   starting them. Device and host have one memory here, so that what a plan writes can be read, and so can what a launch is
   given. */
#include <stddef.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Extent;
typedef struct { Extent grid, block; size_t shared_bytes; void *stream, *attributes; unsigned count; } Configuration;

enum { MOST = 256, MOST_KERNELS = 4096, GIVEN = 384 };
/* `first` begins with the first argument's value; what follows is other memory if it has fewer bytes. */
typedef struct { Extent grid, block; const char *name; unsigned char first[GIVEN]; } Launch;

static struct { const void *kernel; const char *name; } kernels[MOST_KERNELS];
static int registered;

static Launch launches[MOST];
static int launched;

int taken_launches(Launch *into)
{
    int count = launched;
    memcpy(into, launches, (size_t)count * sizeof(Launch));
    launched = 0;
    return count;
}

/* Each library names its kernels when it is loaded. Those of torch, which are many, are of no interest. */
void __cudaRegisterFunction(
    void **library, const void *kernel, char *function, const char *name, int threads, void *thread, void *block,
    void *block_extent, void *grid_extent, int *warp)
{
    if (registered < MOST_KERNELS && strstr(name, "10flashinfer")) {
        kernels[registered].kernel = kernel;
        kernels[registered++].name = name;
    }
}

static const char *name_of(const void *kernel)
{
    for (int number = 0; number < registered; ++number)
        if (kernels[number].kernel == kernel) return kernels[number].name;
    return "";
}

static int note(const void *kernel, Extent grid, Extent block, void **arguments)
{
    if (launched == MOST) return 2; /* "out of memory" */
    launches[launched].name = name_of(kernel);
    launches[launched].grid = grid;
    launches[launched].block = block;
    memcpy(launches[launched].first, arguments[0], GIVEN);
    ++launched;
    return 0;
}

int cudaLaunchKernel(const void *kernel, Extent grid, Extent block, void **arguments, size_t shared_bytes, void *stream)
{
    return note(kernel, grid, block, arguments);
}

int cudaLaunchKernelExC(const Configuration *how, const void *kernel, void **arguments)
{
    return note(kernel, how->grid, how->block, arguments);
}

int cudaMemcpyAsync(void *into, const void *from, size_t bytes, int kind, void *stream)
{
    memcpy(into, from, bytes);
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case 8: *value = 49152; break;   /* shared memory of a block, bytes */
    case 16: *value = 132; break;    /* multiprocessors */
    case 39: *value = 2048; break;   /* threads of a multiprocessor */
    case 75: *value = 9; break;      /* compute capability, major */
    case 81: *value = 233472; break; /* shared memory of a multiprocessor, bytes */
    case 97: *value = 232448; break; /* shared memory that a block may ask for, bytes */
    default: *value = 0;
    }
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *kernel, int threads, size_t shared_bytes, unsigned flags)
{
    *blocks = 2;
    return 0;
}

int cudaGetDevice(int *device)
{
    *device = 0;
    return 0;
}

int cudaSetDevice(int device) { return 0; }

int cudaFuncSetAttribute(const void *kernel, int attribute, int value) { return 0; }
