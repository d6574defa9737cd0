/* CUPTI, through which PyTorch's profiler records kernels. No kernels run, so a profile has only the operators of the host. */
#include <stddef.h>
#include <stdint.h>

enum { CUPTI_SUCCESS = 0, CUPTI_ERROR_MAX_LIMIT_REACHED = 12 };

int cuptiGetVersion(uint32_t *version) { return *version = 130200, CUPTI_SUCCESS; }
int cuptiGetResultString(int result, const char **text) { return *text = "an answer of the phantom GPU", CUPTI_SUCCESS; }
int cuptiGetCallbackName(int domain, uint32_t id, const char **name) { return *name = "", CUPTI_SUCCESS; }
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record) { return CUPTI_ERROR_MAX_LIMIT_REACHED; }
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) { return *count = 0, CUPTI_SUCCESS; }
