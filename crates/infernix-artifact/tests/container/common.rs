//! A small set with everything in it, built in memory and written with the real writer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use infernix_artifact::ngram::{Geometry, NgramTable, VolumeSpec};
use infernix_artifact::{
    ActivationPolicy, ArtifactError, ArtifactId, Binding, BindingPart, Component, Draft, DraftObject,
    JournalKey, LayoutOptions, Layouted, ObjectKind, Proposal, PublishOptions, Resume, Start, Use, Writer,
    WriterOptions,
};
use serde_json::{Map, json};

pub(crate) const LATE: &str = "/components/text/config/ngram_table/volume_id";

pub(crate) fn tensor(id: &str, shape: &[u64], layout: &str, alignment: u64, bytes: u64) -> DraftObject {
    let kind = ObjectKind::Tensor { shape: shape.to_vec(), format: "bf16".into(), layout: layout.into() };
    DraftObject { id: id.into(), kind, alignment, bytes }
}

/// Deterministic bytes of an object.
pub(crate) fn content(index: usize, bytes: u64) -> Vec<u8> {
    let mut state = index as u64 + 1;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        })
        .collect()
}

pub(crate) fn spec() -> VolumeSpec {
    VolumeSpec { format: "fp8_e4m3fn".into(), geometry: Geometry::new(5, 1600).unwrap(), scales: vec![0.25] }
}

pub(crate) fn rows() -> Vec<u8> {
    content(99, 5 * 1600)
}

pub(crate) fn draft(volume: bool) -> Draft {
    let mut config = Map::new();
    config.insert("rms_norm_eps".into(), json!(1e-6));
    config.insert("hidden_size".into(), json!(8));
    if volume {
        let table = NgramTable {
            format: spec().format,
            geometry: spec().geometry,
            volume_id: ArtifactId([0; 16]),
            tables: vec![],
        };
        config.insert("ngram_table".into(), table.to_value());
    }
    let text = Component {
        config,
        target: None,
        resources: BTreeMap::from([("tokenizer.json".into(), "resource/text/tokenizer.json".into())]),
        proposal: Some(Proposal::Indexed { rows: 4 }),
    };
    let mtp = Component { target: Some("text".into()), ..Component::default() };
    let mut provenance = Map::new();
    provenance.insert("source".into(), json!({"base": {"repository": "a/b"}}));
    let whole = |object: &str| Binding::Whole { object: object.into() };
    let part = |object: &str, begin, end| BindingPart { object: object.into(), begin, end };
    Draft {
        components: BTreeMap::from([("text".into(), text), ("mtp".into(), mtp)]),
        objects: vec![
            tensor("weight/000000", &[10, 5], "contiguous_le_v1", 256, 100),
            tensor("weight/000001", &[2, 4, 4], "nvfp4_expert_rg16_v1", 4096, 5000),
            DraftObject {
                id: "resource/text/tokenizer.json".into(),
                kind: ObjectKind::Resource,
                alignment: 1,
                bytes: 37,
            },
            tensor("weight/000002", &[0], "contiguous_le_v1", 256, 0),
            tensor("weight/000003", &[3000], "contiguous_le_v1", 256, 6000),
            tensor("weight/000004", &[], "contiguous_le_v1", 256, 4),
        ],
        bindings: BTreeMap::from([
            ("text/a".into(), whole("weight/000000")),
            (
                "text/b".into(),
                Binding::Parts(vec![part("weight/000000", 5, 10), part("weight/000003", 0, 3000)]),
            ),
            ("text/c".into(), whole("weight/000001")),
        ]),
        uses: vec![Use {
            parameter: "text/a".into(),
            input: "text/x".into(),
            activation_policy: Some(ActivationPolicy::AllowA4),
            auxiliaries: BTreeMap::from([("activation_input_divisor".into(), "weight/000004".into())]),
        }],
        metadata: Map::from_iter([("name".to_owned(), json!("small"))]),
        provenance,
        late: if volume { vec![LATE.into()] } else { vec![] },
    }
}

pub(crate) fn layout(name: &str, max_file_bytes: u64, volume: bool) -> Layouted {
    draft(volume).layout(&LayoutOptions { entry_name: name.into(), max_file_bytes }).unwrap()
}

pub(crate) fn key() -> JournalKey {
    JournalKey::new().with("recipe", "r1").with("source a.safetensors", "100 bytes")
}

pub(crate) fn options() -> WriterOptions {
    WriterOptions { durable: false, checkpoint_bytes: 5000, ..WriterOptions::default() }
}

/// One run of a conversion; continues what an earlier run left.
pub(crate) fn convert(
    out: &Path,
    max_file_bytes: u64,
    volume: bool,
    resume: Resume,
    options: &WriterOptions,
) -> Result<(), ArtifactError> {
    let name = out.file_name().unwrap().to_str().unwrap();
    let writer = match Writer::open(out, layout(name, max_file_bytes, volume), &key(), resume, options)? {
        Start::Writer(writer) => writer,
        Start::Complete(_) => return Ok(()),
    };
    let volume = if volume {
        let mut path = out.as_os_str().to_owned();
        path.push(".ngram");
        let mut volume = writer.volume(&PathBuf::from(path), spec())?;
        let done = volume.rows_done() as usize * 1600;
        for row in rows()[done..].chunks(1600) {
            volume.write_rows(row)?;
        }
        writer.set_late(LATE, &volume.finish()?.0.to_string())?;
        Some(volume)
    } else {
        None
    };
    for i in (0..writer.objects().len()).filter(|&i| !writer.is_done(i)) {
        let bytes = content(i, writer.objects()[i].bytes);
        for (at, chunk) in bytes.chunks(1700).enumerate() {
            writer.write(i, at as u64 * 1700, chunk)?;
        }
        writer.finish(i)?;
    }
    let report = Some(Box::new(|s: &infernix_artifact::Summary| {
        let files: Vec<_> =
            s.files.iter().map(|(path, bytes)| json!({"path": path, "payload_bytes": bytes})).collect();
        serde_json::to_vec_pretty(&json!({"artifact_id": s.artifact_id.to_string(), "files": files})).unwrap()
    }) as infernix_artifact::Report<'_>);
    writer.publish(PublishOptions { volume, reused_rows: None, report, sha256sums: true })?;
    Ok(())
}

/// Every file of a folder.
pub(crate) fn snapshot(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|item| item.unwrap())
        .map(|item| {
            let bytes =
                if item.path().is_dir() { b"(folder)".to_vec() } else { std::fs::read(item.path()).unwrap() };
            (item.file_name().into_string().unwrap(), bytes)
        })
        .collect()
}
