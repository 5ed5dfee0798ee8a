/* A statically linked program that finds the driver API by itself, as some language runtimes do: dlopen by soname, dlsym. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned), (*count)(int *), code, devices = -1;

    if (!library) {
        printf("%s\n", dlerror());
        return 1;
    }
    init = (int (*)(unsigned))dlsym(library, "cuInit");
    count = (int (*)(int *))dlsym(library, "cuDeviceGetCount");
    if (!init || !count)
        return 2;
    if ((code = init(0)) || (code = count(&devices))) {
        printf("error %d\n", code);
        return 3;
    }
    printf("%d device\n", devices);
    return 0;
}
