/* Steps of AdamW with a limit, each in as few passes over memory as it needs, and without any check.

   They show how fast a step could be. `floor.py` compiles and calls them. `step` counts the steps taken before. */

#include <math.h>

typedef struct {
    float *param, *grad, *mean, *square, *state;
    long size;
} Tensor;

typedef struct {
    float lr, beta1, beta2, weight_decay, eps;
} Settings;

/* Read an element as `g`, change it with the statements in `...`, and update its parameter with what is in `g`. */
#define EACH_ELEMENT(tensor, ...)                                                                   \
    {                                                                                               \
        float *restrict param = (tensor)->param, *restrict grad = (tensor)->grad;                   \
        float *restrict mean = (tensor)->mean, *restrict square = (tensor)->square;                 \
        float *restrict state = (tensor)->state;                                                    \
        (void)state;                                                                                \
        for (long i = 0; i < (tensor)->size; i++) {                                                 \
            float g = grad[i];                                                                      \
            __VA_ARGS__;                                                                            \
            mean[i] += (g - mean[i]) * (1 - of.beta1);                                              \
            square[i] = square[i] * of.beta2 + g * g * (1 - of.beta2);                              \
            param[i] = param[i] * kept - rate * mean[i] / (sqrtf(square[i]) * inverse + of.eps);    \
        }                                                                                           \
    }

#define ADAMW                                                                                       \
    const float rate = of.lr / (1 - powf(of.beta1, step + 1)), kept = 1 - of.lr * of.weight_decay;  \
    const float inverse = 1 / sqrtf(1 - powf(of.beta2, step + 1));

static inline float smaller(float a, float b) { return a < b ? a : b; }
static inline float larger(float a, float b) { return a > b ? a : b; }

/* The sum of squares, in blocks of float32 that are added up in float64. */
static double sum_of_squares(const float *values, long size)
{
    double total = 0;
    for (long begin = 0; begin < size; begin += 1024) {
        long end = begin + 1024 < size ? begin + 1024 : size;
        float block = 0;
        for (long i = begin; i < end; i++)
            block += values[i] * values[i];
        total += block;
    }
    return total;
}

void adamw(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, )
}

void clip_norm_global(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    double total = 0;
    for (const Tensor *t = tensors; t < tensors + count; t++)
        total += sum_of_squares(t->grad, t->size);
    const float factor = smaller(1, 1 / sqrt(total));
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, g *= factor)
}

void clip_norm(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        const float factor = smaller(1, 1 / sqrt(sum_of_squares(t->grad, t->size)));
        EACH_ELEMENT(t, g *= factor)
    }
}

void clip_value(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, g = larger(-1e-3f, smaller(1e-3f, g)))
}

void clip_norm_by_ema(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        const double of_grad = sum_of_squares(t->grad, t->size);
        double of_average = 0;
        for (long begin = 0; begin < t->size; begin += 1024) {
            long end = begin + 1024 < t->size ? begin + 1024 : t->size;
            float block = 0;
            for (long i = begin; i < end; i++) {
                const float average = t->state[i] + (t->grad[i] - t->state[i]) * 0.01f;
                t->state[i] = average;
                block += average * average;
            }
            of_average += block;
        }
        const float factor = smaller(1, sqrt(of_average / of_grad));
        EACH_ELEMENT(t, g *= factor)
    }
}

void clip_value_by_ema(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, float limit = state[i] + (fabsf(g) - state[i]) * 0.01f; state[i] = limit;
                     g = larger(-limit, smaller(limit, g)))
}

void clip_value_growth(const Tensor *tensors, long count, long step, Settings of)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, float size = fabsf(g); float before = step ? state[i] : size;
                     float floor = larger(before, 1e-4f); float allowed = smaller(size, step ? floor * 1.5f : size);
                     state[i] = step && size < floor / 2 ? before / 2 : allowed; g = copysignf(allowed, g))
}
