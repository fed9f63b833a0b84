//! What ptxas reported when the kernels were compiled: the hot ones must keep their values in registers.

/// (kernel, target, bytes of spill stores) of a report.
fn spills(report: &str) -> Vec<(String, String, usize)> {
    let mut out = vec![];
    let mut entry: Option<(String, String)> = None;
    for line in report.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let parts: Vec<&str> = rest.split('\'').collect();
            entry = Some((parts[0].into(), parts.get(2).copied().unwrap_or("").into()));
        } else if let (Some(at), Some((name, target))) = (line.find(" bytes spill stores"), &entry) {
            let bytes = line[..at].rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            out.push((name.clone(), target.clone(), bytes));
        }
    }
    out
}

#[test]
fn hot_kernels_do_not_spill() {
    // Kernels whose inner loops decide the speed of a round or of a prompt.
    let hot = |k: &str| {
        let prefixes = ["tile_", "tilew_", "tile4_", "gdn_", "w4a4_", "attn_", "attn8_", "ggml_", "kv8_"];
        prefixes.iter().any(|p| k.starts_with(p))
            || (k.starts_with("gemv_") && (k.ends_with("_n1") || k.ends_with("_n2")))
    };
    // A few words outside the inner loops: the register file of these is full.
    let tolerated = |k: &str| match k {
        "attn8_prefill_256" => 32,
        "gdn_scan_32" | "attn_prefill_256" => 8,
        _ => 0,
    };
    let mut seen = 0;
    for (file, report) in crate::PTXAS {
        for (kernel, target, bytes) in spills(report) {
            seen += 1;
            assert!(
                !hot(&kernel) || bytes <= tolerated(&kernel),
                "{file}: {kernel} for {target} spills {bytes} bytes"
            );
        }
    }
    assert!(crate::PTXAS.is_empty() || seen > 100, "the reports were not understood: {seen} entries");
}

#[test]
fn a_report_is_read() {
    let text = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n    32 bytes stack frame, 48 bytes spill stores, 56 bytes spill loads\n";
    assert_eq!(spills(text), [("k".to_string(), "sm_90a".to_string(), 48)]);
}
