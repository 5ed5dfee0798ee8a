// What the sample programs compute. Compiled to kernels.ptx when the guest is built; no GPU is needed for that.

extern "C" __global__ void vector_add(const float *a, const float *b, float *sum, int n)
{
    int i = blockDim.x * blockIdx.x + threadIdx.x;

    if (i < n)
        sum[i] = a[i] + b[i];
}

#define TILE 16

// product = a * b, square matrices of `width`, a multiple of TILE; one block a tile of the product.
extern "C" __global__ void matrix_multiply(const float *a, const float *b, float *product, int width)
{
    __shared__ float tile_a[TILE][TILE], tile_b[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;

    for (int step = 0; step < width; step += TILE) {
        tile_a[threadIdx.y][threadIdx.x] = a[row * width + step + threadIdx.x];
        tile_b[threadIdx.y][threadIdx.x] = b[(step + threadIdx.y) * width + column];
        __syncthreads();
        for (int k = 0; k < TILE; k++)
            sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();
    }
    product[row * width + column] = sum;
}
