//! What ptxas reported when the kernels were compiled: the hot ones must keep their values in registers.

/// One kernel of a report.
#[derive(Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) kernel: String,
    pub(crate) target: String,
    pub(crate) registers: usize,
    /// Bytes of spill stores.
    pub(crate) spills: usize,
}

pub(crate) fn entries(report: &str) -> Vec<Entry> {
    let mut out: Vec<Entry> = vec![];
    let number = |line: &str, before: &str| -> Option<usize> {
        let at = line.find(before)?;
        line[..at].rsplit(' ').next()?.parse().ok()
    };
    for line in report.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let parts: Vec<&str> = rest.split('\'').collect();
            let target = parts.get(2).copied().unwrap_or("").into();
            out.push(Entry { kernel: parts[0].into(), target, registers: 0, spills: 0 });
        } else if let Some(e) = out.last_mut() {
            e.spills = number(line, " bytes spill stores").unwrap_or(e.spills);
            e.registers = number(line, " registers").unwrap_or(e.registers);
        }
    }
    out
}

#[test]
fn hot_kernels_do_not_spill() {
    // Kernels whose inner loops decide the speed of a round or of a prompt.
    let hot = |k: &str| {
        let prefixes =
            ["tile_", "tilew_", "tile4_", "gdn_", "hc_", "w4a4_", "attn_", "attn8_", "ggml_", "kv8_"];
        prefixes.iter().any(|p| k.starts_with(p))
            || (["gemv_", "group_", "nvfp4_"].iter().any(|p| k.starts_with(p))
                && (k.ends_with("_n1") || k.ends_with("_n2")))
    };
    // A few words outside the inner loops: the register file of these is full.
    let tolerated = |k: &str| match k {
        "attn8_prefill_256" => 32,
        "gdn_scan_32" | "attn_prefill_256" => 8,
        _ => 0,
    };
    let mut seen = 0;
    for (file, report) in crate::PTXAS {
        for e in entries(report) {
            seen += 1;
            assert!(!hot(&e.kernel) || e.spills <= tolerated(&e.kernel), "{file}: {e:?}");
        }
    }
    assert!(crate::PTXAS.is_empty() || seen > 100, "the reports were not understood: {seen} entries");
}

#[test]
fn a_report_is_read() {
    let text = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n    32 bytes stack frame, 48 bytes spill stores, 56 bytes spill loads\nptxas info    : Used 72 registers, used 1 barriers\n";
    let want = Entry { kernel: "k".into(), target: "sm_90a".into(), registers: 72, spills: 48 };
    assert_eq!(entries(text), [want]);
}

/// The FP4 path multiplies by block-scaled FP4 instructions, sixteen of them a tile's step, and not by something slower that the
/// compiler put in their place.
#[test]
#[expect(clippy::print_stderr, reason = "says why nothing was looked at")]
fn fp4_products_are_block_scaled_instructions() {
    let Some((_, image)) = crate::FATBINS.iter().find(|(name, _)| *name == "fp4_tile") else {
        eprintln!("skipped: a build without sm_120");
        return;
    };
    let home = std::env::var_os("CUDA_HOME").map(|h| std::path::PathBuf::from(h).join("bin/cuobjdump"));
    let tool = home.filter(|p| p.is_file()).unwrap_or_else(|| "cuobjdump".into());
    let file = std::env::temp_dir().join(format!("infernix-fp4-{}.fatbin", std::process::id()));
    std::fs::write(&file, image).unwrap();
    let run = std::process::Command::new(&tool).arg("-sass").arg(&file).output();
    std::fs::remove_file(&file).unwrap();
    let Ok(run) = run else {
        eprintln!("skipped: no cuobjdump");
        return;
    };
    let sass = String::from_utf8_lossy(&run.stdout);
    let count = sass.matches("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X").count();
    assert_eq!(count, 16, "{}", String::from_utf8_lossy(&run.stderr));
    assert!(sass.contains("sm_120a"));
}
