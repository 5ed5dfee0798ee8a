/* vectorAdd: adds two vectors of 2^20 numbers on the GPU; exit 0 only where every sum equals the CPU's. */
#include "add.h"

static CUresult run(const char *program)
{
    float *host = malloc(3 * ADD_BYTES);
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;

    if (host == NULL)
        return 2;
    TRY(cuInit(0));
    TRY(cuDeviceGet(&device, 0));
    TRY(cuCtxCreate(&context, 0, device));
    if (load_kernels(program, &module) != 0)
        return 1;
    TRY(cuModuleGetFunction(&kernel, module, "vector_add"));
    if (add_on_card(kernel, host, 0) != 0)
        return 1;
    free(host);
    TRY(cuModuleUnload(module));
    TRY(cuCtxDestroy(context));
    return 0;
}

int main(int argc, char **argv)
{
    (void)argc;
    load_driver();
    if (run(argv[0]) != 0) {
        puts("vectorAdd: FAIL");
        return 1;
    }
    printf("vectorAdd: PASS (%d elements equal the CPU's)\n", ADD_ELEMENTS);
    return 0;
}
