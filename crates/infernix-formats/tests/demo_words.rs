//! Words of the bundled demo checkpoint decode to the reference values bit for bit, also through the layouts.

use std::path::{Path, PathBuf};

use infernix_formats::expert_bank::{BankShape, ExpertMatrix, ExpertRecord, Nvfp4Planes, pack_nvfp4};
use infernix_formats::nvfp4::pack_rows;
use infernix_formats::scalar::{bf16_to_f32, e4m3_to_f32};
use infernix_formats::{Encoded, Format, Layout, RowPlanes, Rows};
use safetensors::SafeTensors;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

struct Demo(Vec<Vec<u8>>);

impl Demo {
    fn load() -> Option<Self> {
        let dir = root().join("models/flash-demo-nvfp4");
        let names = ["model-00001-of-00002", "model-00002-of-00002", "model-fp8-mtp-ple"];
        names
            .map(|n| std::fs::read(dir.join(n).with_extension("safetensors")).ok())
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .map(Demo)
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let found = self
            .0
            .iter()
            .find_map(|f| SafeTensors::deserialize(f).unwrap().tensor(name).ok().map(|t| t.data().to_vec()));
        found.unwrap_or_else(|| panic!("{name} is in no shard"))
    }
}

fn floats(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn demo_words_decode_to_the_reference() {
    let reference = root().join("../shared/models/refs/flash-demo-nvfp4/ref.safetensors");
    let (Some(demo), Ok(reference)) = (Demo::load(), std::fs::read(&reference)) else {
        eprintln!("skipped: the demo checkpoint or its reference is absent");
        return;
    };
    let reference = SafeTensors::deserialize(&reference).unwrap();
    let cases = [(0, 0, "gate_proj"), (3, 17, "up_proj"), (7, 31, "down_proj")];
    for (layer, expert, matrix) in cases {
        let want =
            reference.tensor(&format!("dequant.layers.{layer}.mlp.experts.{expert}.{matrix}")).unwrap();
        let want_bits = floats(want.data());
        let base = |m: &str| format!("model.language_model.layers.{layer}.mlp.experts.{expert}.{m}");
        let (n, k) = (want.shape()[0] as u64, want.shape()[1] as u64);
        let codes = demo.bytes(&(base(matrix) + ".weight"));
        let scales = demo.bytes(&(base(matrix) + ".weight_scale"));
        let global = demo.bytes(&(base(matrix) + ".weight_scale_2"));

        let mut out = vec![0f32; (n * k) as usize];
        Rows::new(Layout::BlockScaleK16V1, Format::Nvfp4Mul, &[n, k], 0..n, &codes, &[], &scales, &global)
            .unwrap()
            .decode_f32(&mut out)
            .unwrap();
        assert_eq!(bits(&out), want_bits, "source words of {matrix}");

        // Through a whole expert record.
        let shape = BankShape::new(Layout::Nvfp4ExpertRg16V1, &[1, 256, 64]).unwrap();
        let all = ["gate_proj", "up_proj", "down_proj"]
            .map(|m| (demo.bytes(&(base(m) + ".weight")), demo.bytes(&(base(m) + ".weight_scale"))));
        let planes = |i: usize| Nvfp4Planes { codes: &all[i].0, scales: &all[i].1 };
        let mut record = vec![0; shape.record_bytes as usize];
        pack_nvfp4(&shape, planes(0), planes(1), planes(2), &mut record).unwrap();
        let m = ExpertMatrix::ALL.into_iter().find(|m| matrix.starts_with(m.name())).unwrap();
        let g = f32::from_le_bytes(global.try_into().unwrap());
        let view = ExpertRecord::new(shape, Format::Nvfp4Mul, [g; 3], &record).unwrap();
        view.validate_words().unwrap();
        view.decode_f32(m, 0..n, &mut out).unwrap();
        assert_eq!(bits(&out), want_bits, "expert record of {matrix}");

        // Through the plain matrix layout.
        let mut packed = RowPlanes::default();
        pack_rows(Layout::BlockScaleK16V1, k as usize, &codes, &scales, g, &mut packed).unwrap();
        let bytes = [&packed.codes[..], &packed.scales, &packed.global].concat();
        let shape = [n, k];
        let view = Encoded::new(Layout::BlockScaleK16V1, Format::Nvfp4Mul, &shape, &bytes).unwrap();
        view.decode_rows_f32(0..n, &mut out).unwrap();
        assert_eq!(bits(&out), want_bits, "matrix layout of {matrix}");
    }

    let rows = reference.tensor("dequant.ngram_rows").unwrap();
    let ids = reference.tensor("ngram_row_ids").unwrap();
    let ids: Vec<i64> = match ids.dtype() {
        safetensors::Dtype::I64 => {
            ids.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
        }
        _ => {
            ids.data().chunks_exact(4).map(|b| i64::from(i32::from_le_bytes(b.try_into().unwrap()))).collect()
        }
    };
    let table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
    let scale = demo.bytes(&format!("{table}.weight_scale"));
    let scale = bf16_to_f32(u16::from_le_bytes([scale[0], scale[1]]));
    let width = rows.shape()[1];
    assert_eq!(ids.len(), rows.shape()[0]);
    for (id, want) in ids.iter().zip(rows.data().chunks_exact(4 * width)) {
        let shard = demo.bytes(&format!("{table}.shard_{}.weight", id / 16_160));
        let at = (id % 16_160) as usize * width;
        let row: Vec<f32> = shard[at..at + width].iter().map(|&c| e4m3_to_f32(c) * scale).collect();
        assert_eq!(bits(&row), floats(want), "table row {id}");
    }
}
