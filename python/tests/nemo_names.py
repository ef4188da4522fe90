"""Every documented name of the two NeMo modules, typed from their reference pages: parameters as
they are written there, "name" or "name=default"."""

CP_ATTENTION = {
    "_base_gemma4_cp_mask": "attention_module ctx q_idx kv_idx kv_global_start=0",
    "_block_mask_set_generation": "gen_tensor",
    "_build_packed_ring_segments": "q_ids k_ids",
    "_cached_block_mask": "key build",
    "_cached_ring_segments": "q_ids k_ids cp_rank owner cp_size",
    "_chunk_dense_eligible": "seg causal",
    "_collect_ring_kv_chunks": "ctx",
    "_compiled_flex_attention": "attention_module",
    "_detach_metadata": "metadata",
    "_direct_exchange": "tensors cp_group cp_rank send_cp_rank recv_cp_rank",
    "_duck_shape_disabled": "",
    "_ffpa_varlen_backward_chunk": (
        "grad_out_pack q_pack k_pack v_pack out_pack lse_pack seg scale causal"
    ),
    "_ffpa_varlen_forward_chunk": "q_pack k_pack v_pack seg scale causal",
    "_ffpa_varlen_ring_available": "",
    "_gather_lse": "lse_dense flat_index",
    "_gather_thd": "t_bhsd flat_index",
    "_gemma4_cp_manual_attention": (
        "attention_module query key value cp_mesh attn_mask dropout_p is_causal scale "
        "enable_gqa kwargs"
    ),
    "_grad_add_live_": "grad_bhsd grad_pack flat_index",
    "_install_gemma4_cp_ring_sdpa": "attention_module cp_mesh",
    "_merge_ffpa_packed_chunk": "out_acc lse_acc out_step lse_step",
    "_merge_flex_chunk": "out_acc lse_acc out_step lse_step",
    "_merge_live_chunk_": "out_acc lse_acc out_pack lse_pack flat_index",
    "_metadata_like": "metadata",
    "_patch_fsdp_accumulated_grad_guard": "",
    "_ring_exchange": "tensors cp_group cp_rank cp_size",
    "_ring_segment_set_generation": "gen_tensor",
    "_ring_use_ffpa_varlen": "attention_module ctx",
    "_route_kv_grads_to_owners": "grad_key_by_owner grad_value_by_owner cp_group cp_rank cp_size",
    "_row_single_doc_full": "row",
    "_row_single_doc_prefix": "row",
    "_run_gemma4_cp_ffpa_varlen_ring_forward": "ctx seg_sink=None",
    "_run_gemma4_cp_ring_attention": "attention_module ctx",
    "_run_gemma4_cp_ring_attention_forward": "attention_module ctx",
    "_run_gemma4_flex_chunk": (
        "attention_module ctx key_chunk value_chunk metadata_chunk kv_global_start"
    ),
    "_scatter_lse": "lse_pack flat_index B Hq S",
    "_scatter_thd": "packed flat_index B H S",
    "_use_live_row_merge": "num_live num_rows",
    "_zero_if_none": "grad like",
    "attach_gemma4_cp_ring_attention": "attention_module use_ffpa=False",
    "gemma4_vision_group_ids": "mm_token_type_ids",
    "CPRingAttentionContext": (
        "module query key value cp_mesh cp_group cp_size cp_rank seq_local seq_full "
        "seq_global_start attn_mask dropout_p is_causal scale enable_gqa kwargs metadata "
        "metadata_seq_dims"
    ),
    "_Gemma4FFPAVarlenRingAttention.forward": "autograd_ctx query key value ring_ctx",
    "_Gemma4FFPAVarlenRingAttention.backward": "autograd_ctx grad_output",
    "_Gemma4FlexRingAttention.forward": "autograd_ctx query key value ring_ctx",
    "_Gemma4FlexRingAttention.backward": "autograd_ctx grad_output",
}
CP_LOCAL_RING = {
    "_cached_sliding_segments": "ctx folded_q_ids folded_nb_ids lo",
    "_concat_neighborhood": "ctx chunks",
    "_fa_ll_dense_bwd": "grad_out st scale win",
    "_fa_ll_dense_fwd": "q k v scale win",
    "_fa_ll_varlen_bwd": "dout_p st seg scale win",
    "_fa_ll_varlen_fwd": "qp kp vp seg scale win",
    "_fold_pad": "ids pm",
    "_owner_grad_dict": "per_owner cp_rank cp_size n_prior zeros_like",
    "_scale_of": "ctx",
    "sliding_ring_compute_fa_bwd": "saved grad_out",
    "sliding_ring_compute_fa_fwd": "ctx chunks",
}
CP_ATTENTION_DATA = {
    "_BLOCK_MASK_CACHE": {},
    "_BLOCK_MASK_GEN": [None, None],
    "_GEMMA4_CP_FLEX_RING_OK_LOGGED": False,
    "_LIVE_ROW_MERGE_MAX_FRACTION": 0.25,
    "_RING_SEGMENT_CACHE": {},
    "_RING_SEGMENT_GEN": [None, None],
}
