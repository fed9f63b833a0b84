//! What verification sees: single changed bytes, references, damage and its repair, equal inputs in other wrappings.

use std::fs;
use std::path::Path;

use crate::common::{converted, demo, fixture, options, shared};
use crate::tensors::{Tensors, load, rebuilt};
use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{RepairOptions, Silent, SourceSpec, VerifyOptions, VerifyReport, repair, verify};
use infernix_formats::expert_bank::{BankShape, ExpertMatrix};
use infernix_formats::{Format, Layout, PlaneRole, expert_bank::ExpertRecord, nvfp4, planes};

const EXACT: &str = "qwen3_8_flash_next_nvfp4";

fn check(artifact: &Path, checkpoint: Option<&Path>) -> Result<VerifyReport, infernix_convert::ConvertError> {
    let mut o = VerifyOptions::new(artifact, checkpoint.map(Path::to_owned));
    o.threads = 2;
    verify(&o, &Silent, &Interrupt::default())
}

#[test]
fn one_changed_byte_anywhere_is_found_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let mut o = options(&demo(), EXACT, &out);
    o.max_file_bytes = 8_000_000;
    let (_, outcome) = converted(&o).unwrap();
    assert!(outcome.files.len() >= 3);
    let artifact = Artifact::open(&out).unwrap();
    let objects = artifact.directory().objects.clone();
    let good = check(&out, Some(&demo())).unwrap();
    let mut seed = 7u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let volume = outcome.volume.clone().unwrap();
    let fix = RepairOptions {
        artifact: out.clone(),
        sources: vec![SourceSpec::new("base", demo())],
        recipe: None,
        ngram: None,
        threads: 2,
    };
    for round in 0..10 {
        // Payload of a random object, through the file it lies in.
        let object = &objects[random(objects.len() as u64) as usize];
        let segment = artifact.segments(object.offset + random(object.bytes), 1).unwrap()[0];
        let path = artifact.paths().nth(segment.file).unwrap().to_owned();
        flip(&path, segment.offset);
        let report = check(&out, None).unwrap();
        assert!(!report.ok && report.digests == "mismatch");
        assert_eq!(report.corrupt_objects, std::slice::from_ref(&object.id));
        if round == 0 {
            let report = check(&out, Some(&demo())).unwrap();
            let seen =
                report.tensor_mismatch_count + report.requantized_mismatches + report.input_scale_mismatches;
            assert!(!report.ok && (seen > 0 || !report.problems.is_empty()), "{report:#?}");
        }
        let repaired = repair(&fix, &Silent, &Interrupt::default()).unwrap();
        assert!(repaired.ok && repaired.repaired_objects == std::slice::from_ref(&object.id), "{repaired:?}");
    }
    for _ in 0..4 {
        flip(&volume, 4096 + random(fs::metadata(&volume).unwrap().len() - 4096));
        let report = check(&out, None).unwrap();
        assert!(!report.ok && report.problems.iter().any(|p| p.contains("ngram")), "{report:?}");
        let repaired = repair(&fix, &Silent, &Interrupt::default()).unwrap();
        assert!(repaired.ok, "{repaired:?}");
    }
    let after = check(&out, Some(&demo())).unwrap();
    assert!(after.ok && after.digest == good.digest, "{after:#?}");
    // Headers and directory: found, or the set no longer opens; either way it does not pass.
    for (_, bytes) in &outcome.files {
        let path = outcome.files.iter().find(|f| f.1 == *bytes).unwrap().0.clone();
        for _ in 0..8 {
            let at = random(4096);
            flip(&path, at);
            assert!(!check(&out, None).is_ok_and(|r| r.ok), "{path:?} byte {at}");
            flip(&path, at);
        }
    }
    for at in [3, 9, 30, 100, 200] {
        flip(&volume, at);
        assert!(!check(&out, None).is_ok_and(|r| r.ok), "volume byte {at}");
        flip(&volume, at);
    }
    assert!(check(&out, None).unwrap().ok);
}

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[test]
fn swapped_parts_of_two_artifacts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.infernix"), dir.path().join("b.infernix"));
    for (out, recipe) in [(&a, EXACT), (&b, "qwen3_8_flash_next_nvfp4_dense8")] {
        let mut o = options(&demo(), recipe, out);
        o.max_file_bytes = 6_000_000;
        converted(&o).unwrap();
    }
    let part = |p: &Path| p.with_file_name(format!("{}.part-0001", p.file_name().unwrap().to_str().unwrap()));
    fs::copy(part(&b), part(&a)).unwrap();
    assert!(check(&a, None).is_err());
}

#[test]
fn decoded_artifact_equals_the_references() {
    let Some(shared) = shared() else { return };
    let reference = load(&shared.join("models/refs/flash-demo-nvfp4"));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let (plan, outcome) = converted(&options(&demo(), EXACT, &out)).unwrap();
    let artifact = Artifact::open(&out).unwrap();
    let floats =
        |bytes: &[u8]| bytes.chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect::<Vec<_>>();
    let mut matrices = 0;
    for (name, (_, shape, bytes)) in &reference {
        // dequant.model.language_model.layers.L.mlp.experts.E.M_proj
        let Some(rest) = name.strip_prefix("dequant.") else { continue };
        let Some((prefix, tail)) = rest.split_once(".mlp.experts.") else { continue };
        let layer = prefix.rsplit('.').next().unwrap();
        let (expert, matrix) = tail.split_once('.').unwrap();
        let matrix = ExpertMatrix::ALL.into_iter().find(|m| matrix.starts_with(m.name())).unwrap();
        let object = plan
            .objects
            .iter()
            .find(|o| o.parameters == [format!("text/layers/{layer}/moe/experts")])
            .unwrap();
        let geometry = BankShape::new(Layout::Nvfp4ExpertRg16V1, &object.shape).unwrap();
        let stored = artifact.bytes(artifact.object(&object.id).unwrap()).unwrap();
        let stored: &[u8] = stored.as_ref();
        let e: u64 = expert.parse().unwrap();
        let r = geometry.record(e);
        let at = (geometry.stride * geometry.experts + 12 * e) as usize;
        let global = |m: usize| f32::from_bits(floats(&stored[at + 4 * m..at + 4 * m + 4])[0]);
        let globals = [global(0), global(1), global(2)];
        let bytes_of = &stored[r.start as usize..r.end as usize];
        let record = ExpertRecord::new(geometry, Format::Nvfp4Mul, globals, bytes_of).unwrap();
        let (rows, _) = geometry.matrix(matrix);
        let mut out = vec![0f32; shape.iter().product::<u64>() as usize];
        record.decode_f32(matrix, 0..rows, &mut out).unwrap();
        assert_eq!(out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), floats(bytes), "{name}");
        matrices += 1;
    }
    assert_eq!(matrices, 3);
    // Table rows: code times the table's scale, which the volume carries.
    let volume = infernix_artifact::ngram::Volume::open(&outcome.volume.unwrap()).unwrap();
    let scale = volume.header().extension.as_ref().unwrap().scales[0];
    let (_, _, ids) = &reference["ngram_row_ids"];
    let width = ids.len() / reference["ngram_row_ids"].1.iter().product::<u64>() as usize;
    let rows: Vec<u64> = ids
        .chunks(width)
        .map(|w| {
            if width == 8 {
                u64::from_le_bytes(w.try_into().unwrap())
            } else {
                u64::from(u32::from_le_bytes(w.try_into().unwrap()))
            }
        })
        .collect();
    let expected =
        reference.iter().find(|(n, _)| n.starts_with("dequant.") && n.contains("ngram")).unwrap().1;
    let expected = floats(&expected.2);
    let decoded: Vec<u32> = rows
        .iter()
        .flat_map(|r| volume.row(*r).unwrap())
        .map(|code| (infernix_formats::scalar::e4m3_to_f32(code) * scale).to_bits())
        .collect();
    assert_eq!(decoded, expected);
}

#[test]
fn shards_and_fused_experts_do_not_change_the_digest() {
    let dir = tempfile::tempdir().unwrap();
    let digest = |source: &Path, recipe: &str, name: &str| {
        let out = dir.path().join(name);
        converted(&options(source, recipe, &out)).unwrap().1.digest
    };
    let single = dir.path().join("single");
    rebuilt(&demo(), &single, |_| {});
    assert_eq!(digest(&demo(), EXACT, "a"), digest(&single, EXACT, "b"), "one shard or many");

    let Some(bf16) = fixture("flash-demo-bf16") else { return };
    let apart = dir.path().join("apart");
    rebuilt(&bf16, &apart, |tensors| {
        let fused: Vec<String> = tensors
            .keys()
            .filter(|n| n.ends_with("gate_up_proj") || n.ends_with("experts.down_proj"))
            .cloned()
            .collect();
        for name in fused {
            let (dtype, shape, bytes) = tensors.remove(&name).unwrap();
            let (prefix, kind) = name.rsplit_once('.').unwrap();
            let per_expert = bytes.len() / shape[0] as usize;
            for e in 0..shape[0] as usize {
                let part = &bytes[e * per_expert..(e + 1) * per_expert];
                let mut put = |m: &str, rows: u64, bytes: &[u8]| {
                    let value = (dtype.clone(), vec![rows, shape[2]], bytes.to_vec());
                    tensors.insert(format!("{prefix}.{e}.{m}_proj.weight"), value);
                };
                if kind == "down_proj" {
                    put("down", shape[1], part);
                } else {
                    put("gate", shape[1] / 2, &part[..per_expert / 2]);
                    put("up", shape[1] / 2, &part[per_expert / 2..]);
                }
            }
        }
    });
    assert_eq!(digest(&bf16, "auto", "c"), digest(&apart, "auto", "d"), "fused or per expert");
}

/// Names of an NVFP4 matrix's words: ModelOpt's multipliers, compressed-tensors' divisors.
const CONVENTIONS: [[&str; 4]; 2] = [
    ["weight", "weight_scale", "weight_scale_2", "input_scale"],
    ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
];

/// Renames NVFP4 matrices from one convention to the other; second scales become their reciprocals.
fn in_the_other_convention(tensors: &mut Tensors, from: &[&str; 4], to: &[&str; 4]) {
    let second = format!(".{}", from[2]);
    let bases: Vec<String> =
        tensors.keys().filter_map(|n| n.strip_suffix(&second)).map(str::to_owned).collect();
    assert!(!bases.is_empty());
    for base in bases {
        for (n, (from, to)) in from.iter().zip(to).enumerate() {
            let Some((dtype, shape, mut bytes)) = tensors.remove(&format!("{base}.{from}")) else { continue };
            if n >= 2 {
                let word = f32::from_le_bytes(bytes[..].try_into().unwrap());
                bytes = (1.0 / word).to_le_bytes().to_vec();
            }
            tensors.insert(format!("{base}.{to}"), (dtype, shape, bytes));
        }
    }
}

/// Row-major planes of an NVFP4 matrix, or the records of a bank; without second scales, which are what differs.
fn nvfp4_planes(artifact: &Artifact, object: &infernix_convert::PlannedObject) -> Vec<Vec<u8>> {
    let stored = artifact.bytes(artifact.object(&object.id).unwrap()).unwrap();
    let planes = planes(object.layout, object.format.unwrap(), &object.shape).unwrap();
    let kept = planes.iter().filter(|p| p.role != PlaneRole::GlobalScale);
    kept.map(|p| {
        let bytes = &stored.as_ref()[p.offset as usize..][..p.bytes as usize];
        let mut out = bytes.to_vec();
        if p.role == PlaneRole::Scales {
            let k = object.shape[object.shape.len() - 1] as usize;
            nvfp4::unpack_scales(object.layout, k, bytes, &mut out).unwrap();
        }
        out
    })
    .collect()
}

#[test]
fn both_nvfp4_conventions_give_equal_code_and_scale_planes() {
    let cases = [(Some(demo()), 0, 8), (fixture("dense-demo-quasar"), 1, 62)];
    for (source, convention, at_least) in cases {
        let Some(source) = source else { continue };
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        let (from, to) = (&CONVENTIONS[convention], &CONVENTIONS[1 - convention]);
        rebuilt(&source, &other, |t| in_the_other_convention(t, from, to));
        let make = |source: &Path, name: &str| {
            let out = dir.path().join(name);
            let (plan, _) = converted(&options(source, "auto", &out)).unwrap();
            (plan, Artifact::open(&out).unwrap())
        };
        let ((one, a), (two, b)) = (make(&source, "a.infernix"), make(&other, "b.infernix"));
        let mut compared = 0;
        for x in one.objects.iter().filter(|o| matches!(o.format, Some(Format::Nvfp4 | Format::Nvfp4Mul))) {
            let y = two.objects.iter().find(|o| o.parameters == x.parameters).unwrap();
            assert!(matches!(y.format, Some(Format::Nvfp4 | Format::Nvfp4Mul)) && y.format != x.format);
            assert_eq!(nvfp4_planes(&a, x), nvfp4_planes(&b, y), "{:?}", x.parameters);
            compared += 1;
        }
        assert!(compared >= at_least, "{source:?}: {compared} objects");
    }
}

#[test]
fn a_changed_checkpoint_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    converted(&options(&demo(), EXACT, &out)).unwrap();
    let other = dir.path().join("other");
    let up = "model.language_model.layers.6.mlp.experts.30.up_proj";
    rebuilt(&demo(), &other, |t| {
        t.get_mut(&format!("{up}.weight")).unwrap().2[128 * 3 + 5] ^= 0x20;
        t.get_mut(&format!("{up}.input_scale")).unwrap().2[0] ^= 1;
        t.get_mut("lm_head.weight").unwrap().2[2 * (256 * 9 + 8)] ^= 1;
        t.get_mut("mtp.fc_hidden.weight").unwrap().2[1] ^= 0x40;
        t.get_mut("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight")
            .unwrap()
            .2[16 * 100] ^= 1;
    });
    let report = check(&out, Some(&other)).unwrap();
    assert!(!report.ok && report.digests == "ok");
    assert_eq!(
        (report.expert_mismatches, report.input_scale_mismatches, report.ngram_row_mismatches),
        (1, 1, 1)
    );
    assert_eq!(report.requantized_mismatches, 1);
    assert_eq!(report.tensor_mismatch_count, 3, "{report:#?}");
    let place = |m: &infernix_convert::Mismatch| (m.tensor.clone(), m.row, m.column);
    assert!(
        report.tensor_mismatches.iter().map(place).any(|p| p == (format!("{up}.weight"), 3, 10)),
        "{report:#?}"
    );
    assert!(report.tensor_mismatches.iter().map(place).any(|p| p == ("lm_head.weight".into(), 9, 8)));
}
