/* Steps of AdamW alone and behind limits, without checks and in as few passes over memory as possible.

   `floor.py` compiles and calls them, to show how fast a step could be. `step` is the number of steps taken before. */

#include <math.h>

typedef struct {
    float *param, *grad, *mean, *square, *state;
    long size;
} Tensor;

typedef struct {
    float lr, beta1, beta2, weight_decay, eps;
} Settings;

/* Read the gradient of each element as `g`, run the statements in `...`, and update the parameter with `g`. */
#define EACH_ELEMENT(tensor, ...)                                                                  \
    {                                                                                              \
        float *restrict param = (tensor)->param, *restrict grad = (tensor)->grad;                  \
        float *restrict mean = (tensor)->mean, *restrict square = (tensor)->square;                \
        float *restrict state = (tensor)->state;                                                   \
        (void)state;                                                                               \
        for (long i = 0; i < (tensor)->size; i++) {                                                \
            float g = grad[i];                                                                     \
            __VA_ARGS__;                                                                           \
            mean[i] += (g - mean[i]) * (1 - settings.beta1);                                       \
            square[i] = square[i] * settings.beta2 + g * g * (1 - settings.beta2);                 \
            float root = sqrtf(square[i]) * inverse + settings.eps;                                \
            param[i] = param[i] * decay - rate * mean[i] / root;                                   \
        }                                                                                          \
    }

#define ADAMW                                                                                      \
    const float rate = settings.lr / (1 - powf(settings.beta1, step + 1));                         \
    const float decay = 1 - settings.lr * settings.weight_decay;                                   \
    const float inverse = 1 / sqrtf(1 - powf(settings.beta2, step + 1));

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

void adamw(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, )
}

void clip_norm_global(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    double total = 0;
    for (const Tensor *t = tensors; t < tensors + count; t++)
        total += sum_of_squares(t->grad, t->size);
    const float factor = smaller(1, 1 / sqrt(total));
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, g *= factor)
}

void clip_norm(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        const float factor = smaller(1, 1 / sqrt(sum_of_squares(t->grad, t->size)));
        EACH_ELEMENT(t, g *= factor)
    }
}

void clip_value(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t, g = larger(-1e-3f, smaller(1e-3f, g)))
}

void clip_norm_by_ema(const Tensor *tensors, long count, long step, Settings settings)
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

void clip_value_by_ema(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        EACH_ELEMENT(t,
                     float limit = state[i] + (fabsf(g) - state[i]) * 0.01f;
                     state[i] = limit;
                     g = larger(-limit, smaller(limit, g)))
}

void clip_value_growth(const Tensor *tensors, long count, long step, Settings settings)
{
    ADAMW
    for (const Tensor *t = tensors; t < tensors + count; t++)
        if (!step)
            EACH_ELEMENT(t, state[i] = fabsf(g))
        else
            EACH_ELEMENT(t,
                         float size = fabsf(g);
                         float floor = larger(state[i], 1e-4f);
                         float allowed = smaller(size, floor * 1.5f);
                         state[i] = size < floor / 2 ? state[i] / 2 : allowed;
                         g = copysignf(allowed, g))
}
