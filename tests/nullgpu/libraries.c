// cuBLAS and cuDNN: handles and a single algorithm, without any computation.
#include "nullgpu.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <string.h>

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  *handle = new_handle();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *descriptor, cublasComputeType_t compute, cudaDataType_t scale) {
  *descriptor = new_handle();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t leading) {
  *layout = new_handle();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
  *preference = new_handle();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t *results, int *found) {
  memset(results, 0, sizeof *results);
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

// The cuDNN frontend builds a graph, queries engines, builds a plan and queries its workspace.
cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  *handle = new_handle();
  return CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return "status of a stand-in for cuDNN"; }
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor) {
  *descriptor = new_handle();
  return CUDNN_STATUS_SUCCESS;
}
// One engine without notes or knobs, and a plan without workspace, since its real size is unknown.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested, int64_t *found, void *values) {
  int is_number = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_INT32;
  if (values && is_number && requested > 0) memset(values, 0, type == CUDNN_TYPE_INT64 ? 8 : 4);
  if (found) *found = is_number || type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
  return CUDNN_STATUS_SUCCESS;
}
