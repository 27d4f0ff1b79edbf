"""Operations that have a kernel for the CPU and none for CUDA.

Key of PyTorch's dispatcher -> operations without a kernel for it, with their overloads.
Written by `tests/tools/cuda_kernels.py`, from PyTorch built for CUDA: 2.11 to 2.15.
"""

LACKING: dict[str, frozenset[str]] = {
    "CUDA": frozenset(
        """
_quantized::_wrapped_linear_prepack _quantized::_wrapped_quantized_linear_prepacked
_quantized::linear_dynamic _quantized::linear_prepack_fp16
_quantized::linear_prepack_fp16_legacy _quantized::wrapped_fbgemm_linear_fp16_weight
_quantized::wrapped_fbgemm_pack_gemm_matrix_fp16 _quantized::wrapped_quantized_linear
aten::_add_relu.Scalar aten::_add_relu.Tensor aten::_add_relu.out
aten::_add_relu_.Scalar aten::_add_relu_.Tensor
aten::_convert_weight_to_int4pack_for_cpu aten::_dyn_quant_matmul_4bit
aten::_dyn_quant_pack_4bit_weight aten::_functional_assert_async.msg
aten::_histogramdd_bin_edges aten::_histogramdd_from_bin_cts
aten::_histogramdd_from_bin_tensors aten::_spdiags aten::_upsample_lanczos2d_aa.out
aten::_upsample_lanczos2d_aa_backward.grad_input aten::_weight_int4pack_mm_for_cpu
aten::histogram.bin_ct aten::histogram.bin_ct_out aten::histogram.bins_tensor
aten::histogram.bins_tensor_out aten::narrow_copy.out
aten::quantize_per_tensor.tensors aten::quantized_gru.data
aten::quantized_gru.data_legacy aten::quantized_gru.input
aten::quantized_gru.input_legacy aten::quantized_lstm.data
aten::quantized_lstm.data_legacy aten::quantized_lstm.input
aten::quantized_lstm.input_legacy aten::slow_conv3d_forward
aten::slow_conv3d_forward.output aten::to_mkldnn mkl::_mkl_linear
mkl::_mkl_reorder_linear_weight mkldnn::_convolution_pointwise
mkldnn::_convolution_pointwise.binary mkldnn::_convolution_pointwise_.binary
mkldnn::_convolution_transpose_pointwise mkldnn::_linear_pointwise
mkldnn::_linear_pointwise.binary mkldnn::_reorder_convolution_transpose_weight
mkldnn::_reorder_convolution_weight mkldnn::_reorder_linear_weight
mkldnn::_reorder_mkldnn_rnn_layer_weight mkldnn_prepacked::conv2d_prepack
mkldnn_prepacked::conv2d_run onednn::linear_prepack_fp16 onednn::qadd.tensor
onednn::qadd_relu.tensor onednn::qbatch_norm2d onednn::qconv2d_pointwise.binary
onednn::qconv2d_pointwise.binary_tensor onednn::qconv_pointwise
onednn::qconv_pointwise.tensor onednn::qconv_prepack onednn::qlinear_pointwise
onednn::qlinear_pointwise.binary onednn::qlinear_pointwise.binary_tensor
onednn::qlinear_pointwise.tensor onednn::qlinear_prepack onednn::qmul.tensor
prepacked::conv2d_clamp_prepack prepacked::conv2d_clamp_run
prepacked::conv2d_transpose_clamp_prepack prepacked::conv2d_transpose_clamp_run
prepacked::linear_clamp_prepack prepacked::linear_clamp_run quantized::conv1d_dynamic
quantized::conv2d_dynamic quantized::conv3d_dynamic
quantized::conv_transpose1d_dynamic quantized::conv_transpose2d_dynamic
quantized::conv_transpose3d_dynamic quantized::embedding_4bit
quantized::embedding_bag_2bit_prepack
quantized::embedding_bag_2bit_prepack_with_rowwise_min_max
quantized::embedding_bag_2bit_rowwise_offsets quantized::embedding_bag_2bit_unpack
quantized::embedding_bag_4bit quantized::embedding_bag_4bit_prepack
quantized::embedding_bag_4bit_prepack_with_rowwise_min_max
quantized::embedding_bag_byte quantized::embedding_bag_byte_prepack
quantized::embedding_bag_byte_prepack_with_rowwise_min_max quantized::embedding_byte
quantized::int4mm_packed_weight_cpu quantized::linear_dynamic
quantized::linear_dynamic_fp16 quantized::linear_dynamic_fp16_unpacked_weight
quantized::linear_prepack_fp16 quantized::linear_prepack_fp16_legacy
quantized::linear_relu_dynamic quantized::linear_relu_dynamic_fp16
quantized::linear_unpack.legacy quantized::linear_unpack_fp16.legacy
quantized::linear_with_input_q_dq_qweight_dq_output_fp32
quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32
quantized::make_quantized_cell_params quantized::make_quantized_cell_params_dynamic
quantized::max_pool2d quantized::quantized_gru_cell_dynamic
quantized::quantized_lstm_cell_dynamic quantized::quantized_rnn_relu_cell_dynamic
quantized::quantized_rnn_tanh_cell_dynamic sparse::qlinear_dynamic
sparse::qlinear_relu_dynamic
""".split()
    ),
    "QuantizedCUDA": frozenset(
        """
_quantized::add _quantized::conv2d _quantized::conv2d_prepack _quantized::conv2d_relu
_quantized::conv3d_prepack _quantized::conv_transpose1d
_quantized::conv_transpose1d_prepack _quantized::conv_transpose2d
_quantized::conv_transpose2d_prepack _quantized::conv_transpose3d_prepack
_quantized::linear _quantized::linear_prepack aten::_adaptive_avg_pool3d
aten::_prelu_kernel aten::adaptive_avg_pool3d.out aten::cat.out aten::channel_shuffle
aten::dequantize.tensors aten::eq.Scalar_out aten::eq.Tensor_out aten::equal
aten::ge.Scalar_out aten::ge.Tensor_out aten::grid_sampler_2d aten::gt.Scalar_out
aten::gt.Tensor_out aten::hardsigmoid.out aten::hardtanh aten::hardtanh.out
aten::hardtanh_ aten::le.Scalar_out aten::le.Tensor_out aten::leaky_relu.out
aten::lt.Scalar_out aten::lt.Tensor_out aten::max aten::max.unary_out aten::mean.out
aten::min aten::min.unary_out aten::ne.Scalar_out aten::ne.Tensor_out
aten::quantized_batch_norm aten::quantized_max_pool1d aten::quantized_max_pool3d
aten::reflection_pad1d.out aten::reflection_pad2d aten::reflection_pad2d.out
aten::resize_ aten::std.correction aten::std.correction_out quantized::add.Scalar
quantized::add.Scalar2 quantized::add.Scalar_out quantized::add.out quantized::add_out
quantized::add_relu.Scalar quantized::add_relu.Scalar2 quantized::add_relu.Scalar_out
quantized::add_relu.out quantized::add_relu_out quantized::add_scalar
quantized::add_scalar.Tensor quantized::add_scalar_out
quantized::add_scalar_out.Tensor quantized::add_scalar_relu
quantized::add_scalar_relu.Tensor quantized::add_scalar_relu_out
quantized::add_scalar_relu_out.Tensor quantized::batch_norm quantized::batch_norm1d
quantized::batch_norm1d_relu quantized::batch_norm2d quantized::batch_norm2d_relu
quantized::batch_norm3d quantized::batch_norm3d_relu quantized::batch_norm_relu
quantized::cat quantized::cat_out quantized::cat_relu quantized::cat_relu_out
quantized::celu quantized::clamp quantized::conv2d quantized::conv2d_add
quantized::conv2d_add_relu quantized::conv2d_relu quantized::conv3d
quantized::conv3d.new quantized::conv3d_prepack quantized::conv3d_relu
quantized::conv3d_relu.new quantized::conv_prepack quantized::conv_transpose1d
quantized::conv_transpose1d_prepack quantized::conv_transpose2d
quantized::conv_transpose2d_prepack quantized::conv_transpose3d
quantized::conv_transpose3d_prepack quantized::dropout quantized::elu
quantized::embedding_bag_prepack quantized::group_norm quantized::hardswish
quantized::instance_norm quantized::layer_norm quantized::leaky_relu
quantized::linear_leaky_relu quantized::linear_prepack_legacy quantized::linear_tanh
quantized::matmul quantized::max_pool1d quantized::mul quantized::mul.Scalar
quantized::mul.Scalar2 quantized::mul.Scalar_out quantized::mul.out quantized::mul_out
quantized::mul_relu quantized::mul_relu.Scalar quantized::mul_relu.Scalar2
quantized::mul_relu.Scalar_out quantized::mul_relu.out quantized::mul_relu_out
quantized::mul_scalar quantized::mul_scalar.Tensor quantized::mul_scalar_out
quantized::mul_scalar_out.Tensor quantized::mul_scalar_relu
quantized::mul_scalar_relu.Tensor quantized::mul_scalar_relu_out
quantized::mul_scalar_relu_out.Tensor quantized::prelu quantized::relu6
quantized::sigmoid quantized::softmax quantized::threshold sparse::qlinear
sparse::qlinear_prepack sparse::qlinear_relu
""".split()
    ),
    "SparseCsrCUDA": frozenset(
        """
aten::_sparse_mm_reduce_impl aten::_sparse_mm_reduce_impl_backward
""".split()
    ),
}
