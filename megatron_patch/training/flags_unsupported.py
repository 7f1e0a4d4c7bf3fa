"""Flags of Megatron-LM that are not supported here, each with its reason, and flags of other projects with our name.

UNSUPPORTED: Megatron's dest -> reason, for every option of the 0.19.2 parser that this package does not take.
SPELLINGS: dest -> option strings, where they are not the dest with dashes.
DIFFERENT: dest -> how a supported option differs from Megatron-LM's, and why.
IGNORED: flag -> why nothing has to be done; it is accepted with a notice.
FOREIGN: flag of another project or of a launcher -> what to do here.
"""


def _table(reasons: dict[str, str]) -> dict[str, str]:
    return {dest: reason for reason, dests in reasons.items() for dest in dests.split()}


UNSUPPORTED = _table({
    'CUDA graphs are not captured by this training loop': '''
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_warmup_steps cuda_graph_scope_deprecated
        cuda_graph_modules inference_cuda_graph_scope optimizer_cuda_graph''',
    'no fully sharded data parallelism here; --use-distributed-optimizer shards gradients and optimizer state': '''
        use_megatron_fsdp use_torch_fsdp2 torch_fsdp2_reshard_after_forward data_parallel_sharding_strategy
        outer_dp_sharding_strategy fsdp_double_buffer fsdp_manual_registration suggested_communication_unit_size
        keep_fp8_transpose_cache enable_full_sharding_in_hsdp create_all_gather_group megatron_fsdp_main_params_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail strict_fsdp_dtensor_load
        init_model_with_meta_device''',
    'only --optimizer adam and sgd are built here': '''
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2
        use_layer_wise_param_layout dump_param_to_param_group_map''',
    'offload of the optimizer needs --use-precision-aware-optimizer, and a run with both does not resume (Megatron-LM issue 1842)': '''
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
        pin_cpu_grads pin_cpu_params''',
    'only GPT-like decoders are built here, from --hf-model or --family': '''
        encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length bert_binary_head bert_load
        bert_embedder_type output_bert_embeddings spec hybrid_layer_pattern hybrid_override_pattern
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json relative_attention_num_buckets
        relative_attention_max_distance mask_prob short_seq_prob sample_rate ict_head_size biencoder_projection_dim
        biencoder_shared_query_context_model ict_load titles_data_path query_in_block_prob use_one_sent_docs
        evidence_data_path retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
        indexer_batch_size indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction
        data_per_class_fraction data_sharding head_lr_mult vision_pretraining vision_pretraining_type
        vision_backbone_type swin_backbone_type mask_type mask_factor iter_per_epoch dino_local_img_size
        dino_local_crops_number dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer
        dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs mamba_training_ssm_states_dtype
        openai_gelu onnx_safe freeze_all_layers''',
    'this command trains; it does not serve or run inference': '''
        inference_batch_times_seqlen_threshold max_tokens_to_oom use_legacy_static_engine inference_max_requests
        inference_max_seq_length inference_dynamic_batching inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_block_size inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_track_generated_token_events
        decode_only_cuda_graphs inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_sampling_backend
        offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_logprobs_mode inference_logging_step_interval inference_text_gen_server_logging
        inference_wandb_logging inference_coordinator_port mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives inference_disable_ep_consensus
        inference_shards''',
    'reinforcement learning lives in the rlhf package': '''
        perform_rl_step rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower grpo_clamp_eps_upper
        grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward langrl_env_config
        rl_default_temperature rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference
        rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts rl_inference_logprobs_is_correction
        rl_importance_sampling_truncation_coef rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin
        rl_sequence_packing_algo rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap rl_skip_bos_token
        rl_profile rl_profile_dir rl_inference_parsers''',
    'retired by Megatron-LM; use --micro-batch-size': 'batch_size',
    'retired by Megatron-LM; use --tensor-model-parallel-size': 'model_parallel_size',
    'retired by Megatron-LM; use --lr-warmup-fraction': 'warmup',
    'retired by Megatron-LM; use --recompute-activations or --recompute-granularity': 'checkpoint_activations',
    'retired by Megatron-LM; use --apply-wd-to-qk-layernorm': 'no_weight_decay_cond_type',
    'retired by Megatron-LM; use --ckpt-format': 'dist_ckpt_format_deprecated dist_ckpt_workers',
    'use --config FILE': 'yaml_cfg',
    'it does not go with distributed checkpoints, the only format here': 'overlap_param_gather_with_optimizer_step',
    'the batch size is constant here': '''
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed phase_transition_iterations''',
    'evaluation uses the batch sizes of training, from the first --eval-interval on, on one validation set': '''
        start_eval_at_iter eval_global_batch_size eval_micro_batch_size full_validation multiple_validation_sets
        validation_set_names test_mode''',
    'profile with the PyTorch profiler or nsys around the command': '''
        profile profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks record_memory_history
        memory_snapshot_path record_shapes nvtx_ranges''',
    'metrics.jsonl and TensorBoard already hold step time, tokens/s, loss scale and validation loss': '''
        log_throughput log_progress timing_log_level timing_log_option log_timers_to_tensorboard
        log_params_norm log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval
        log_device_memory_used log_world_size_to_tensorboard log_energy''',
    'datasets are read from local or mounted files with one cache, --data-cache-path': '''
        object_storage_cache_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap''',
    'ranks are ordered as tp-cp-ep-dp-pp, core\'s default': '''
        use_tp_pp_dp_mapping''',
    'use Python logging and --tensorboard-dir': '''
        logging_level wandb_project wandb_exp_name wandb_save_dir wandb_entity enable_one_logger one_logger_project
        one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version''',
    'a debugging aid of Megatron-LM that this training loop has not': '''
        check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval train_sync_interval
        empty_unused_memory_level result_rejected_tracker_filename iterations_to_skip save_params_interval
        save_activations_interval save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
        moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights log_straggler straggler_ctrlr_port
        straggler_minmax_count disable_straggler_on_startup run_workload_inspector_server error_injection_rate
        error_injection_type rerun_mode check_for_spiky_loss fault_injector_ranks fault_injector_num_ranks
        fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds
        fault_injector_seed flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace flight_recorder_include_only_active
        flight_recorder_extra_dump_on_exec fake_process_group manual_gc manual_gc_interval manual_gc_eval''',
    'restart the job with torchrun; --exit-signal-handler and --save-interval make it resume': '''
        exit_signal_handler_for_dataloader exit_signal_handler_for_training adlr_autoresume adlr_autoresume_interval
        inprocess_restart inprocess_max_iterations inprocess_monitor_thread_interval
        inprocess_monitor_process_interval inprocess_progress_watchdog_interval inprocess_heartbeat_interval
        inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
        inprocess_active_world_size inprocess_empty_cuda_cache enable_ft_package calc_ft_timeouts ft_num_warmup_iters''',
    'checkpoints are torch_dist in global storage, written by megatron-core itself': '''
        non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication replication_jump replication_factor
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
        async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority
        async_ckpt_use_cpu_shm ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity
        dist_ckpt_save_pre_mcore_014 verify_integrity stream_ckpt_dequant enable_msc disable_msc_deprecated''',
    'use --ckpt-step to choose a checkpoint and --finetune to restart at iteration 0': 'override_ckpt_iteration',
    'main parameters always follow the loaded weights': 'load_main_params_from_ckpt',
    'the layout and tokenizer of a run come from its flags, not from the checkpoint': '''
        use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args''',
    'convert with toolkits.convert; a dense model is not upcycled while training': '''
        moe_use_upcycling moe_upcycling_granularity''',
    'Hugging Face tokenizers only, by --tokenizer-model': '''
        vocab_file merge_file vocab_extra_ids pad_vocab_size metadata_path special_tokens tiktoken_pattern
        tiktoken_num_special_tokens tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens null_tokenizer_pad_id chat_template
        sft_tokenizer_prompt_format''',
    'data come from --data-path and its per-split forms, as plain text or mock data': '''
        data_args_path per_split_data_args_path per_dataset_sequences_path fim_data fim_rate fim_spm_rate
        fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token
        fim_pad_token fim_eod_token sft''',
    'use --reset-attention-mask with --reset-position-ids': 'dataloader_inter_document_masking',
    'distillation is not part of this training loop': '''
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dir logits_save_dtype logits_load_dir
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth logits_load_kd_loss_alpha
        logits_load_ignore_errors''',
    'needs Transformer Engine or kitchen parts that this package does not set up': '''
        te_rng_tracker inference_rng_tracker te_precision_config_file tp_comm_overlap_cfg use_kitchen_attention
        kitchen_attention_backend fp4_param_gather''',
    'process groups are made in one way here': '''
        lazy_mpu_init nccl_communicator_config_path use_sharp sharp_enabled_group high_priority_stream_groups
        distributed_timeout_seconds_after_init align_grad_reduce disable_jit_fuser enable_experimental''',
})

# Fields that came after megatron-core 0.16.1: flags where the installed core has them, refused by name where not.
LATER = frozenset('''
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    overlap_dispatch_backward_with_experts_wgrad cpu_offloading_retain_pinned_cpu_buffers mtp_use_repeated_layer
    mtp_detach_heads mtp_hybrid_override_pattern flash_attention_version dsa_indexer_topk_freq
    dsa_indexer_skip_topk_offset dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 use_mup mup_width_mult
    mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
    fused_residual_rmsnorm use_transformer_engine_op_fuser fp8_output_proj high_priority_a2a_comm_stream
    use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size moe_router_quantile_balancing_ema
    moe_router_force_biased use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias
    moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_pad_experts_for_cuda_graph_inference
    moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy moe_mlp_glu_interleave_size
    moe_expert_rank_capacity_factor nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    mlp_chunks_for_training delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    activation_offload_fraction moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu fine_grained_offloading_max_inflight_offloads mla_down_proj_fusion
    ddp_num_buckets ddp_param_name_patterns_for_fp32_local_accumulation
'''.split())

SPELLINGS = {
    'cuda_graph_scope_deprecated': ['--cuda-graph-scope'],
    'torch_fsdp2_reshard_after_forward': ['--torch-fsdp2-no-reshard-after-forward'],
    'muon_split_qkv': ['--muon-no-split-qkv'],
    'use_layer_wise_param_layout': ['--no-use-layer-wise-param-layout'],
    'bert_binary_head': ['--bert-no-binary-head'],
    'data_sharding': ['--no-data-sharding'],
    'offset_sampling_seed_by_dp_rank': ['--use-same-sampling-seed-across-dp-ranks'],
    'inference_dynamic_batching_enable_prefix_caching': [
        '--inference-dynamic-batching-prefix-caching', '--no-inference-dynamic-batching-prefix-caching'],
    'dist_ckpt_format_deprecated': ['--dist-ckpt-format'],
    'disable_msc_deprecated': ['--disable-msc'],
    'metadata_path': ['--tokenizer-metadata'],
    'special_tokens': ['--tokenizer-special-tokens'],
    'enable_one_logger': ['--no-one-logger'],
}

DIFFERENT = {
    'transformer_impl': 'native layers are ours and the default; transformer_engine and local are accepted as spellings',
    'optimizer': 'adam and sgd only, see UNSUPPORTED',
    'ckpt_format': 'torch_dist only, see UNSUPPORTED',
    'tokenizer_type': 'Hugging Face tokenizers and NullTokenizer only',
    'yarn_correction_range_round_to_int': "True is what Megatron-LM's None comes to",
    'dataloader_type': 'external data loaders cannot be given by a flag',
    'moe_deepep_num_sms': "megatron-core 0.16 has 20 for the same None",
    'moe_hybridep_num_sms': "megatron-core 0.16 has 16 for the same None",
    'moe_router_score_function': 'choices are those of the installed megatron-core',
    'moe_flex_dispatcher_backend': 'choices are those of the installed megatron-core',
}

IGNORED = {
    '--use-mcore-models': 'models are always megatron-core models',
    '--use-flash-attn': 'attention is chosen by --attention-backend and --transformer-impl',
    '--use-dist-ckpt': 'checkpoints are always distributed checkpoints',
    '--ckpt-fully-parallel-save': 'it is the default; --no-ckpt-fully-parallel-save turns it off',
    '--yarn-correction-range-round-to-int': 'it is the default; --no-yarn-correction-range-round-to-int turns it off',
}
# Deprecated stock spellings with an exact modern form.
REWRITTEN = {
    '--use-rotary-position-embeddings': ('--position-embedding-type', 'rope'),
    '--no-position-embedding': (),
}

LAUNCHER = 'an option of torchrun: give it before -m megatron_patch.pretrain'
FOREIGN = {
    '--mtp-depth': 'use --mtp-num-layers',
    '--use-multi-token-prediction': 'use --mtp-num-layers N',
    '--mtp-coeff': 'use --mtp-loss-scaling-factor',
    '--attn-recompute': 'use --recompute-granularity selective --recompute-modules core_attn '
                        '(and mla_up_proj with multi-latent attention)',
    '--mlp-recompute': 'use --recompute-granularity selective --recompute-modules mlp moe',
    '--mla-rms-recompute': 'use --recompute-granularity selective --recompute-modules layernorm mla_up_proj',
    '--mlp-rms-recompute': 'use --recompute-granularity selective --recompute-modules layernorm mlp',
    '--q-rms-recompute': 'use --recompute-granularity selective --recompute-modules mla_up_proj',
    '--recompute-variance': 'use --recompute-granularity selective --recompute-modules layernorm moe_act mla_up_proj, '
                            'which save the same memory',
    '--moe-router-use-sigmoid': 'use --moe-router-score-function sigmoid',
    '--moe-router-norm-topk-prob': 'nothing to give: probabilities are normalised with sigmoid and topk > 1',
    '--moe-noaux-gamma': 'use --moe-router-enable-expert-bias --moe-router-bias-update-rate',
    '--moe-router-num-node-group': 'use --moe-router-num-groups',
    '--moe-router-topk-limited-devices': 'use --moe-router-num-groups and --moe-router-group-topk',
    '--moe-complementary-seq-aux-loss': 'use --moe-router-load-balancing-type seq_aux_loss',
    '--moe-comm-aux-loss-coeff': 'Megatron-LM has no communication-level balance loss; use --moe-aux-loss-coeff',
    '--moe-device-level-aux-loss-coeff': 'Megatron-LM has no device-level balance loss; use --moe-aux-loss-coeff',
    '--moe-device-level-capacity': 'use --moe-expert-capacity-factor, which is per expert',
    '--moe-extended-tp': 'use --expert-tensor-parallel-size',
    '--moe-use-legacy-grouped-gemm': 'use --moe-grouped-gemm',
    '--tp-only-amax-red': 'no flag of Megatron-LM sets it',
    '--wait-after-ckpt': 'nothing to give: a checkpoint is complete when the call returns',
    '--last-bucket-split-count': 'use --reduce-bucket-size',
    '--distributed-checkpointing': 'checkpoints are always distributed checkpoints',
    '--tokenizer-name-or-path': 'use --tokenizer-type HuggingFaceTokenizer --tokenizer-model',
    '--RMSNorm': 'use --normalization RMSNorm',
    '--layernorm-epsilon': 'use --norm-epsilon',
    '--causal-lm': 'nothing to give: models are causal',
    '--dtype': 'use --bf16 or --fp16; it is fp32 without either',
    '--tp': 'use --tensor-model-parallel-size', '--pp': 'use --pipeline-model-parallel-size',
    '--cp': 'use --context-parallel-size', '--ep': 'use --expert-model-parallel-size', '--etp': 'use --expert-tensor-parallel-size',
    '--sp': 'use --sequence-parallel', '--hf': 'use --hf-model', '--vpp': 'use --num-virtual-stages-per-pipeline-rank',
    '--job-name': 'use --tensorboard-dir and --save',
    '--nproc_per_node': LAUNCHER, '--nproc-per-node': LAUNCHER, '--nnodes': LAUNCHER, '--node_rank': LAUNCHER,
    '--node-rank': LAUNCHER, '--master_addr': LAUNCHER, '--master-addr': LAUNCHER, '--master_port': LAUNCHER,
    '--master-port': LAUNCHER,
    '--local-rank': 'torchrun tells ranks by environment variables', '--local_rank': 'torchrun tells ranks by '
                                                                                     'environment variables',
}


def unsupported_flags() -> dict[str, str]:
    """Option string -> reason, for every unsupported flag in all its spellings."""
    out = {}
    for dest, reason in UNSUPPORTED.items():
        stem = dest.replace('_', '-')
        for name in SPELLINGS.get(dest, [f'--{stem}', f'--no-{stem}', f'--disable-{stem}']):
            out[name] = reason
    return out
