"""The table of `_compat.py`: PyTorch's private names, and what needs each."""

# feature -> {our name: PyTorch's}
NAMES: dict[str, dict[str, str]] = {
    "an operation on a GPU tensor": {
        "torch_C": "torch._C",
        "torch_ops": "torch._ops",
        "TensorBase": "torch._C.TensorBase",
        "StorageBase": "torch._C.StorageBase",
        "PythonStorageBase": "torch.storage._StorageBase",
        "DisableTorchFunction": "torch._C.DisableTorchFunction",
        "DisableTorchFunctionSubclass": "torch._C.DisableTorchFunctionSubclass",
        "DisableTorchDispatch": "torch._C._DisableTorchDispatch",
        "disabled_torch_function": "torch._C._disabled_torch_function_impl",
        "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
        "HigherOrderOperator": "torch._ops.HigherOrderOperator",
        "TorchDispatchModeKey": "torch._C._TorchDispatchModeKey",
        "get_dispatch_mode": "torch._C._get_dispatch_mode",
        "set_dispatch_mode": "torch._C._set_dispatch_mode",
        "unset_dispatch_mode": "torch._C._unset_dispatch_mode",
        "len_dispatch_stack": "torch._C._len_torch_dispatch_stack",
        "dispatch_modes": (
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
        ),
        "function_modes": "torch.overrides._get_current_function_mode_stack",
        "DispatchKey": "torch._C.DispatchKey",
        "DispatchKeySet": "torch._C.DispatchKeySet",
        "SetExcludeDispatchKeyGuard": "torch._C._SetExcludeDispatchKeyGuard",
        "has_computed_kernel": (
            "torch._C._dispatch_has_computed_kernel_for_dispatch_key"
        ),
        "has_kernel": "torch._C._dispatch_has_kernel_for_dispatch_key",
        "raw_make_wrapper_subclass": "torch.Tensor._make_wrapper_subclass",
        "raw_parse_to": "torch._C._nn._parse_to",
        "conj": "torch._conj",
        "neg_view": "torch._neg_view",
        "suggest_memory_format": "torch._prims_common.suggest_memory_format",
    },
    "taking the GPUs away": {
        "len_function_stack": "torch.overrides._len_torch_function_stack",
        "pop_function_mode": "torch.overrides._pop_mode",
        "push_function_mode": "torch.overrides._push_mode",
        "len_mode_stack": "torch.utils._python_dispatch._len_torch_dispatch_stack",
        "pop_dispatch_mode": "torch.utils._python_dispatch._pop_mode",
        "push_dispatch_mode": "torch.utils._python_dispatch._push_mode",
    },
    "a stack of function modes": {
        "raw_pop_function_stack": "torch._C._pop_torch_function_stack",
        "push_on_function_stack": "torch._C._push_on_torch_function_stack",
    },
    "torch.set_default_device": {
        "device_module": "torch.utils._device",
        "DeviceContext": "torch.utils._device.DeviceContext",
        "device_constructors": "torch.utils._device._device_constructors",
    },
    "the index of a device": {
        "get_device_index": "torch.cuda._utils._get_device_index",
    },
    "custom operations": {"OPDEFS": "torch._library.custom_ops.OPDEFS"},
    "TorchScript": {"builtin_table": "torch.jit._builtins._get_builtin_table"},
    "torch.compile": {
        "torch_compile": "torch._compile",
        "call_module": "torch.nn.Module._call_impl",
    },
    "nested lists and dictionaries of tensors": {
        "tree_leaves": "torch.utils._pytree.tree_leaves",
        "tree_map_only": "torch.utils._pytree.tree_map_only",
    },
    "backward": {
        "current_autograd_node": "torch._C._current_autograd_node",
        "current_graph_task_id": "torch._C._current_graph_task_id",
        "raw_run_backward": "torch.autograd._engine_run_backward",
        "sequence_number": "torch._C._autograd._get_sequence_nr",
        "execution_engine": "torch.autograd.Variable._execution_engine",
    },
    "backward in place": {
        "disable_modes": "torch.utils._python_dispatch._disable_current_modes",
        "storage_use_count": "torch._C._storage_Use_Count",
    },
    "torch.func": {
        "is_legacy_batchedtensor": "torch._C._functorch.is_legacy_batchedtensor",
        "is_functorch_tensor": "torch._C._functorch.is_functorch_wrapped_tensor",
        "get_unwrapped": "torch._C._functorch.get_unwrapped",
        "add_batch_dim": "torch._add_batch_dim",
        "remove_batch_dim": "torch._remove_batch_dim",
        "from_functional_tensor": "torch._from_functional_tensor",
    },
    "FakeTensors": {
        "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
        "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
        "FunctionalTensor": "torch._subclasses.functional_tensor.FunctionalTensor",
        "fake_tensor_module": "torch._subclasses.fake_tensor",
        "raw_run_fallback_kernel": "torch._subclasses.fake_tensor.run_fallback_kernel",
    },
    "scaled_dot_product_attention": {
        "raw_attention": "torch._C._nn.scaled_dot_product_attention",
        "attention_by_products": "torch._scaled_dot_product_attention_math",
        "sdp_priority_order": "torch._C._get_sdp_priority_order",
        "flex_attention_operator": "torch._higher_order_ops.flex_attention",
    },
    "torch.autocast": {
        "ExcludeDispatchKeyGuard": "torch._C._ExcludeDispatchKeyGuard",
        "registrations": "torch._C._dispatch_get_registrations_for_dispatch_key",
        "include_dispatch_key": "torch._C._dispatch_tls_set_dispatch_key_included",
    },
    "deterministic algorithms": {
        "are_deterministic": "torch._C._get_deterministic_algorithms",
        "warn_of_nondeterminism": ("torch._C._get_deterministic_algorithms_warn_only"),
    },
    "preferred libraries of linear algebra": {
        "BlasBackend": "torch._C._BlasBackend",
        "LinalgBackend": "torch._C._LinalgBackend",
    },
    "packed sequences": {"pad_packed_sequence": "torch._VF._pad_packed_sequence"},
    "random numbers": {"Generator": "torch._C.Generator"},
    "optimizers with foreach": {
        "raw_group_tensors": "torch._C._group_tensors_by_device_and_dtype",
    },
    "C++ extensions": {
        "ExtensionVersioner": "torch.utils._cpp_extension_versioner.ExtensionVersioner",
    },
    "arguments of Module.to": {"torch_C_nn": "torch._C._nn"},
    "nn.DataParallel": {
        "parallel_functions": "torch.nn.parallel._functions",
        "flatten_dense_tensors": "torch._utils._flatten_dense_tensors",
        "flatten_sparse_tensors": "torch._utils._flatten_sparse_tensors",
        "reorder_tensors_as": "torch._utils._reorder_tensors_as",
        "take_tensors": "torch._utils._take_tensors",
        "unflatten_dense_tensors": "torch._utils._unflatten_dense_tensors",
        "unflatten_sparse_tensors": "torch._utils._unflatten_sparse_tensors",
    },
    "sharing GPU memory between processes": {
        "raw_share_cuda": "torch.storage.UntypedStorage._share_cuda_",
        "new_shared_filename": "torch.storage.UntypedStorage._new_shared_filename_cpu",
    },
    "the profiler": {
        "ExperimentalConfig": "torch._C._profiler._ExperimentalConfig",
        "RecordFunctionFast": "torch._C._profiler._RecordFunctionFast",
        "profiler_enabled": "torch._C._autograd._profiler_enabled",
        "raw_start_trace": "torch.autograd.profiler.profile._start_trace",
        "raw_parse_kineto_results": (
            "torch.autograd.profiler.profile._parse_kineto_results"
        ),
    },
    "races between streams": {
        "storage_of_weak_ref": "torch.storage.UntypedStorage._new_with_weak_ptr",
        "Access": "torch.cuda._sanitizer.Access",
        "AccessType": "torch.cuda._sanitizer.AccessType",
        "CUDASanitizerErrors": "torch.cuda._sanitizer.CUDASanitizerErrors",
        "EventHandler": "torch.cuda._sanitizer.EventHandler",
        "UnsynchronizedAccessError": "torch.cuda._sanitizer.UnsynchronizedAccessError",
    },
    "stray contexts": {"check_stray_context": "torch.cuda._check_stray_context"},
    "torch.distributed": {
        "distributed_C": "torch._C._distributed_c10d",
        "SymmetricMemory": "torch._C._distributed_c10d._SymmetricMemory",
        "FakeProcessGroup": "torch._C._distributed_c10d.FakeProcessGroup",
        "Work": "torch._C._distributed_c10d.Work",
        "FakeWork": "torch._C._distributed_c10d.FakeWork",
        "register_work": "torch._C._distributed_c10d._register_work",
        "ErrorType": "torch._C._distributed_c10d.ErrorType",
        "work_from_future": "torch._C._distributed_c10d._create_work_from_future",
        "process_group_named": "torch._C._distributed_c10d._resolve_process_group",
        "process_group_name": "torch.distributed.distributed_c10d._process_group_name",
        "process_groups": "torch.distributed.distributed_c10d._world",
        "raw_new_process_group": (
            "torch.distributed.distributed_c10d._new_process_group_helper"
        ),
        "raw_wrap_process_group": (
            "torch.distributed.distributed_c10d._create_process_group_wrapper"
        ),
        "raw_object_device": (
            "torch.distributed.distributed_c10d._get_object_coll_device"
        ),
        "raw_get_backend": "torch.distributed.ProcessGroup._get_backend",
        "raw_backend_name": "torch.distributed.ProcessGroup._get_backend_name",
        "raw_enable_timing": (
            "torch.distributed.ProcessGroup._enable_collectives_timing"
        ),
        "raw_sequence_number": (
            "torch.distributed.ProcessGroup._get_sequence_number_for_group"
        ),
        "raw_start_coalescing": "torch.distributed.ProcessGroup._start_coalescing",
        "raw_end_coalescing": "torch.distributed.ProcessGroup._end_coalescing",
        "CppFuture": "torch._C.Future",
    },
    "numbers of collectives": {  # until 2.13; later nobody calls it
        "raw_begin_sequence": (
            "torch.distributed.ProcessGroup._set_sequence_number_for_group"
        ),
    },
    "names of NCCL beside nccl": {  # since 2.14
        "ensure_backend": (
            "torch.distributed.distributed_c10d.Backend._ensure_backend_registered"
        ),
        "backend_plugins": "torch.distributed.distributed_c10d.Backend._plugins",
    },
    "DistributedDataParallel": {
        "assign_buckets": "torch.distributed._compute_bucket_assignment_by_size",
        "raw_broadcast_coalesced": "torch.distributed._broadcast_coalesced",
        "raw_verify_parameters": "torch.distributed._verify_params_across_processes",
        "DDPJoinHook": "torch.nn.parallel.distributed._DDPJoinHook",
        "raw_root_copy_hook": (
            "torch.nn.parallel.DistributedDataParallel._root_copy_hook"
        ),
    },
    "proving a program on several ranks": {
        "AsyncCollectiveTensor": (
            "torch.distributed._functional_collectives.AsyncCollectiveTensor"
        ),
        "checkpoint_wrapper": (
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        ),
    },
    "checkpoints of dry runs": {
        "raw_open_zip_reader": "torch.serialization._open_zipfile_reader",
        "raw_open_zip_writer": "torch.serialization._open_zipfile_writer",
        "DistWrapper": "torch.distributed.checkpoint.utils._DistWrapper",
        "raw_validate_plan": (
            "torch.distributed.checkpoint.default_planner._validate_global_plan"
        ),
    },
    "dry runs of many ranks": {
        "fsdp_param": "torch.distributed.fsdp._fully_shard._fsdp_param",
        "sharding_prop": "torch.distributed.tensor._sharding_prop",
        "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    },
    "a dry run behind another one": {
        "forget_shardings": "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        "forget_transforms": (
            "torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear"
        ),
        "forget_planners": (
            "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache"
        ),
    },
    "which memory of a dry run is gradients": {
        "fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "fsdp_runtime": "torch.distributed.fsdp._runtime_utils",
    },
    "dry runs of many parameters": {  # since 2.13
        "raw_propagate_strided": (
            "torch.distributed.tensor._sharding_prop._propagate_use_strided_shard_flag"
        ),
    },
    "torch.distributed.rpc": {
        "rpc_C": "torch._C._distributed_rpc",
        "RPCPickler": "torch.distributed.rpc.internal._InternalRPCPickler",
        "rpc_pickler": "torch.distributed.rpc.api._default_pickler",
        "rpc_agent": "torch.distributed.rpc.api._get_current_rpc_agent",
        "raw_run_rpc_function": "torch.distributed.rpc.internal._run_function",
    },
}
