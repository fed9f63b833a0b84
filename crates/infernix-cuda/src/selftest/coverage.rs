//! Which family runs which kernels. A kernel without an entry fails a test of this build; one that its family leaves out fails
//! the self-test on a device, which compares launches with the loaded modules.

/// (family, kernels); a star stands for the formats, widths and head sizes of one template.
const KERNELS: &[(&str, &[&str])] = &[
    ("linear", &["gemv_*", "nvfp4_*"]),
    ("ggml", &["ggml_*"]),
    ("experts", &["exp_table", "swiglu_table", "e4m3_table", "w4a4_up_*", "w4a4_down_*", "group_experts"]),
    ("state", &["gdn_step"]),
    ("gdn_chunk", &["gdn_prepare", "gdn_scan_*"]),
    ("hyper", &["hc_down_*", "hc_up_*"]),
    ("router", &["router_topk"]),
    (
        "rows",
        &[
            "rms_norm",
            "rope_table",
            "head_norm_rope",
            "conv_silu",
            "conv_fold",
            "gated_norm",
            "swiglu",
            "mul_sigmoid",
            "add",
            "embed",
            "combine",
        ],
    ),
    (
        "glue",
        &[
            "copy_rows_16",
            "copy_rows_2",
            "embed_table",
            "gather_columns",
            "inject",
            "silu_over",
            "twice_sigmoid_over",
            "mix_streams",
            "ple_gate",
            "ple_conv",
            "ple_fold",
            "index_append",
            "expert_chain",
            "zipf_route",
        ],
    ),
    (
        "fused",
        &[
            "group_q8_*",
            "group_q4_*",
            "group_fp8_*",
            "route_experts",
            "attn_prep",
            "attn_rows_*",
            "skinny",
            "qsa_score4",
        ],
    ),
    ("attention", &["attn_decode_*", "attn_merge", "kv_append"]),
    ("attention8", &["rotate_queries_*", "kv8_append_*", "attn8_decode_*", "attn8_prefill_*"]),
    ("select", &["qsa_score", "qsa_chunk", "qsa_select", "top_chunk", "top_sort"]),
    ("tile", &["tile_*", "tilew_*", "pack_32", "pack_64", "pack_64p"]),
    ("tile_experts", &["tile4_rg16", "pack_16", "pack_fp4", "sort_count", "sort_place", "sort_lists"]),
    ("prefill", &["attn_prefill_*"]),
    ("stored", &["expert_fetch", "expert_planes", "stored_*"]),
];

fn covers(pattern: &str, kernel: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == kernel, |p| kernel.starts_with(p))
}

#[test]
fn every_kernel_has_a_self_test_entry() {
    let compiled: Vec<(&str, String)> = crate::PTXAS
        .iter()
        .flat_map(|(file, report)| crate::ptxas::entries(report).into_iter().map(move |e| (*file, e.kernel)))
        .collect();
    for (file, kernel) in &compiled {
        let known = KERNELS.iter().any(|(_, all)| all.iter().any(|p| covers(p, kernel)));
        assert!(known, "{file}.cu: {kernel} has no self-test; add it to a family and to this list");
    }
    // A build without nvcc has no names to compare.
    for pattern in KERNELS.iter().flat_map(|(_, all)| *all).filter(|_| !compiled.is_empty()) {
        let targets = crate::embedded_targets();
        let built = match *pattern {
            "tilew_*" => targets.contains(&"sm_90a"),
            "tile4_rg16" => targets.iter().any(|t| t.starts_with("sm_120")),
            _ => true,
        };
        let known = compiled.iter().any(|(_, kernel)| covers(pattern, kernel));
        assert!(known || !built, "no kernel is called {pattern}");
    }
}

#[test]
fn families_of_the_list_exist() {
    for (family, _) in KERNELS {
        assert!(crate::selftest::FAMILIES.contains(family), "{family}");
    }
}
