//! An artifact as a safetensors checkpoint: names and planes of each scheme, shards and index, configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use infernix_artifact::ngram::RowFormat;
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::{Format, PlaneRole};
use serde_json::{Map, Value, json};

use super::weights::{Described, Experts, Item, Table, Weight, Weights};
use super::{Content, OutFile, OutTensor, OutType, Setting};
use crate::ConvertError;
use crate::described::VISION_KEYS;

/// A quantized module as a configuration names it.
struct Quantized {
    module: String,
    format: Format,
    input: bool,
    /// Whether `module` is a prefix of the modules meant.
    experts: bool,
}

struct Builder<'a> {
    setting: &'a Setting<'a>,
    tensors: Vec<OutTensor>,
    quantized: Vec<Quantized>,
    /// Matrices that are not quantized.
    plain: Vec<String>,
    refused: Vec<String>,
}

/// Dtype of a direct format.
fn dtype(format: Format) -> Option<&'static str> {
    Some(match format {
        Format::Bf16 => "BF16",
        Format::Fp16 => "F16",
        Format::Fp32 => "F32",
        Format::Int32 => "I32",
        Format::Int64 => "I64",
        _ => return None,
    })
}

/// Why a format has no equal in safetensors checkpoints.
fn refusal(name: &str, format: Format) -> Option<String> {
    if format.group_spec().is_some() {
        return Some(format!(
            "{name} is {format}, which no safetensors checkpoint holds (export --to gguf keeps 4, 5 and 8 bits)"
        ));
    }
    matches!(format, Format::Ggml(_) | Format::GgmlExperts(..)).then(|| {
        format!(
            "{name} is in blocks of {format}, which safetensors checkpoints do not hold; use export --to gguf"
        )
    })
}

impl<'a> Builder<'a> {
    fn push(&mut self, name: String, dtype: &'static str, shape: Vec<u64>, content: Content) {
        let size = match dtype {
            "F32" | "I32" => 4,
            "BF16" | "F16" => 2,
            "I64" => 8,
            _ => 1,
        };
        let bytes = shape.iter().product::<u64>() * size;
        self.tensors.push(OutTensor { name, ty: OutType::Hf(dtype), shape, bytes, content });
    }

    fn weight(&mut self, w: &Arc<Weight>) {
        if let Some(dtype) = dtype(w.format) {
            if w.shape.len() == 2 && w.name.ends_with(".weight") {
                self.plain.push(w.base().to_owned());
            }
            let content = Content::Plane { weight: w.clone(), role: PlaneRole::Codes };
            self.push(w.name.clone(), dtype, w.shape.clone(), content);
            return;
        }
        if let Some(reason) = refusal(&w.name, w.format) {
            self.refused.push(reason);
            return;
        }
        let &[n, k] = &w.shape[..] else {
            let (name, format, shape) = (&w.name, w.format, &w.shape);
            self.refused
                .push(format!("{name} is {format} of shape {shape:?}; checkpoints quantize matrices only"));
            return;
        };
        self.quantized.push(Quantized {
            module: w.base().to_owned(),
            format: w.format,
            input: w.input_scale.is_some(),
            experts: false,
        });
        let plane = |role| Content::Plane { weight: w.clone(), role };
        self.planes(w.base(), w.format, n, k, plane);
        if let Some(object) = w.input_scale {
            self.input(w.base(), w.format, Content::Object(object));
        }
    }

    fn input(&mut self, base: &str, format: Format, content: Content) {
        if format == Format::Nvfp4 {
            self.push(format!("{base}.input_global_scale"), "F32", vec![1], content);
        } else {
            self.push(format!("{base}.input_scale"), "F32", Vec::new(), content);
        }
    }

    /// The tensors of a quantized matrix `[n,k]`.
    fn planes(&mut self, base: &str, format: Format, n: u64, k: u64, plane: impl Fn(PlaneRole) -> Content) {
        use PlaneRole::{Codes, GlobalScale, Scales};
        let name = |suffix: &str| format!("{base}.{suffix}");
        match format {
            Format::Nvfp4Mul => {
                self.push(name("weight"), "U8", vec![n, k / 2], plane(Codes));
                self.push(name("weight_scale"), "F8_E4M3", vec![n, k / 16], plane(Scales));
                self.push(name("weight_scale_2"), "F32", Vec::new(), plane(GlobalScale));
            }
            Format::Nvfp4 => {
                self.push(name("weight_packed"), "U8", vec![n, k / 2], plane(Codes));
                self.push(name("weight_scale"), "F8_E4M3", vec![n, k / 16], plane(Scales));
                self.push(name("weight_global_scale"), "F32", vec![1], plane(GlobalScale));
            }
            Format::Fp8Row => {
                self.push(name("weight"), "F8_E4M3", vec![n, k], plane(Codes));
                self.push(name("weight_scale"), "BF16", vec![n, 1], plane(Scales));
            }
            Format::Fp8Tensor => {
                self.push(name("weight"), "F8_E4M3", vec![n, k], plane(Codes));
                self.push(name("weight_scale"), "F32", Vec::new(), plane(GlobalScale));
            }
            Format::Fp8Block128 => {
                self.push(name("weight"), "F8_E4M3", vec![n, k], plane(Codes));
                let tiles = vec![n.div_ceil(128), k.div_ceil(128)];
                self.push(name("weight_scale_inv"), "F32", tiles, plane(Scales));
            }
            Format::Mxfp8 => {
                self.push(name("weight"), "F8_E4M3", vec![n, k], plane(Codes));
                self.push(name("weight_scale"), "U8", vec![n, k / 32], plane(Scales));
            }
            _ => {}
        }
    }

    fn experts(&mut self, e: &Arc<Experts>) {
        let formats = ExpertMatrix::ALL.map(|m| e.format(m));
        for format in formats {
            if let Some(reason) = refusal(&e.prefix, format) {
                self.refused.push(reason);
                return;
            }
        }
        if let (Some(up), Some(low)) = (dtype(formats[0]), dtype(formats[2])) {
            if let super::weights::ExpertWords::Parents { gate_up, down } = &e.words {
                let plane = |w: &Arc<Weight>| Content::Plane { weight: w.clone(), role: PlaneRole::Codes };
                let shape = vec![e.experts, 2 * e.intermediate, e.hidden];
                self.push(format!("{}.gate_up_proj", e.prefix), up, shape, plane(gate_up));
                let shape = vec![e.experts, e.hidden, e.intermediate];
                self.push(format!("{}.down_proj", e.prefix), low, shape, plane(down));
            }
            return;
        }
        if formats[0] != formats[2] {
            let (prefix, up, down) = (&e.prefix, formats[0], formats[2]);
            self.refused
                .push(format!("{prefix}: gate and up are {up}, down is {down}; checkpoints have one scheme"));
            return;
        }
        let format = formats[0];
        self.quantized.push(Quantized {
            module: e.prefix.clone(),
            format,
            input: e.input_scales.is_some(),
            experts: true,
        });
        for expert in 0..e.experts {
            for matrix in ExpertMatrix::ALL {
                let base = format!("{}.{expert}.{}_proj", e.prefix, matrix.name());
                let [n, k] = e.matrix(matrix);
                let plane = |role| Content::Expert { experts: e.clone(), expert, matrix, role };
                self.planes(&base, format, n, k, plane);
                if e.input_scales.is_some() {
                    let content = Content::ExpertInput { experts: e.clone(), expert, matrix };
                    self.input(&base, format, content);
                }
            }
        }
    }

    /// Parts of the table as the configuration announces them, and the hash buffers.
    fn table(&mut self, t: &Table) -> Result<(), ConvertError> {
        let Some(volume) = self.setting.volume else {
            self.refused.push(format!("{}: no n-gram volume is at hand", t.prefix));
            return Ok(());
        };
        let Some(format) = self.setting.row_format()? else { return Ok(()) };
        let (w, row) = (t.width, u64::from(volume.geometry().row_bytes));
        if let RowFormat::Ggml(_) = format {
            self.refused.push(format!(
                "the n-gram table is in blocks of {}, which safetensors checkpoints do not hold; use export --to gguf",
                format.name()
            ));
            return Ok(());
        }
        let parts = t.parts.clamp(1, t.rows.max(1));
        let per = t.rows.div_ceil(parts);
        let scales = volume.header().extension.as_ref().map(|e| e.scales.clone()).unwrap_or_default();
        let scale = scales.get(t.table).copied();
        for part in 0..parts {
            let (a, b) = ((part * per).min(t.rows), ((part + 1) * per).min(t.rows));
            let (n, rows) = (b - a, t.first_row + a..t.first_row + b);
            let base = if parts == 1 { t.prefix.clone() } else { format!("{}.shard_{part}", t.prefix) };
            let cut = |from: u64, to: u64| Content::Table { rows: rows.clone(), row, cut: from..to };
            match format {
                RowFormat::Fp8E4m3fn => {
                    self.push(format!("{base}.weight"), "F8_E4M3", vec![n, w], cut(0, row))
                }
                RowFormat::Bf16 => self.push(format!("{base}.weight"), "BF16", vec![n, w], cut(0, row)),
                RowFormat::Nvfp4 | RowFormat::Nvfp4Mul => {
                    let codes = if format == RowFormat::Nvfp4 { "weight_packed" } else { "weight" };
                    self.push(format!("{base}.{codes}"), "U8", vec![n, w / 2], cut(0, w / 2));
                    self.push(format!("{base}.weight_scale"), "F8_E4M3", vec![n, w / 16], cut(w / 2, row));
                }
                _ => {}
            }
        }
        let word = |scale: Option<f32>| Content::Bytes(scale.unwrap_or(1.0).to_le_bytes().to_vec());
        match (format, t.scale) {
            (RowFormat::Fp8E4m3fn, Some(object)) => {
                let o = &self.setting.artifact.directory().objects[object];
                let dtype = o.format().and_then(|f| f.parse().ok()).and_then(dtype).unwrap_or("BF16");
                self.push(format!("{}.weight_scale", t.prefix), dtype, vec![1], Content::Object(object));
            }
            (RowFormat::Fp8E4m3fn, None) => {
                self.push(format!("{}.weight_scale", t.prefix), "F32", vec![1], word(scale));
            }
            (RowFormat::Nvfp4Mul, _) => {
                self.push(format!("{}.weight_scale_2", t.prefix), "F32", Vec::new(), word(scale));
            }
            (RowFormat::Nvfp4, _) => {
                self.push(format!("{}.weight_global_scale", t.prefix), "F32", vec![1], word(scale));
            }
            _ => {}
        }
        if let Described::Model(config) = self.setting.described
            && let Some(ple) = &config.ple
        {
            let constants = infernix_model::ngram::constants(ple, config.vocab)
                .map_err(|e| self.setting.fail(e.to_string()))?;
            if let Some(c) = constants.get(t.table) {
                for (name, values) in [
                    ("layer_multipliers", &c.multipliers),
                    ("ngram_heads_vocab_sizes", &c.head_sizes),
                    ("ngram_heads_offsets", &c.head_offsets),
                ] {
                    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    let shape = vec![values.len() as u64];
                    self.push(format!("{}.{name}", t.buffers), "I64", shape, Content::Bytes(bytes));
                }
            }
        }
        Ok(())
    }

    /// The quantization configuration, in the one dialect that knows all schemes at hand.
    fn quantization(&mut self, weights: &Weights) -> Result<Option<Value>, ConvertError> {
        let has = |f: Format| self.quantized.iter().any(|q| q.format == f);
        if self.quantized.is_empty() {
            return Ok(None);
        }
        let only_block = self.quantized.iter().all(|q| q.format == Format::Fp8Block128);
        let modelopt =
            has(Format::Nvfp4Mul) || has(Format::Mxfp8) || (has(Format::Fp8Block128) && !only_block);
        if has(Format::Nvfp4) && (modelopt || has(Format::Fp8Block128)) {
            let other = self
                .quantized
                .iter()
                .find(|q| !matches!(q.format, Format::Nvfp4 | Format::Fp8Row | Format::Fp8Tensor));
            let other = other.map_or(String::new(), |q| format!("{} ({})", q.format, q.module));
            self.refused.push(format!(
                "no quantization configuration describes NVFP4 with a divisor (compressed-tensors) together with {other}"
            ));
            return Ok(None);
        }
        if only_block {
            return Ok(Some(json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": self.plain,
            })));
        }
        if modelopt || (has(Format::Fp8Tensor) && !has(Format::Fp8Row) && !has(Format::Nvfp4)) {
            let algo = |q: &Quantized| match q.format {
                Format::Nvfp4Mul if q.input => json!({"quant_algo": "NVFP4", "group_size": 16}),
                Format::Nvfp4Mul => json!({"quant_algo": "W4A16_NVFP4", "group_size": 16}),
                Format::Mxfp8 => json!({"quant_algo": "MXFP8", "group_size": 32}),
                Format::Fp8Row => json!({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
                Format::Fp8Block128 => json!({"quant_algo": "FP8_PB_WO"}),
                _ => json!({"quant_algo": "FP8"}),
            };
            let mut layers: Map<String, Value> =
                self.quantized.iter().map(|q| (q.module.clone(), algo(q))).collect();
            for t in &weights.tables {
                match self.setting.row_format()? {
                    Some(RowFormat::Fp8E4m3fn) => {
                        _ = layers.insert(t.prefix.clone(), json!({"quant_algo": "FP8"}))
                    }
                    Some(RowFormat::Nvfp4Mul) => {
                        layers.insert(t.prefix.clone(), json!({"quant_algo": "NVFP4", "group_size": 16}));
                    }
                    _ => {}
                }
            }
            return Ok(Some(json!({
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": self.plain,
                "producer": {"name": "modelopt"}, "quantized_layers": layers,
            })));
        }
        let mut groups: BTreeMap<(Format, bool), Vec<String>> = BTreeMap::new();
        for q in &self.quantized {
            let target = match q.experts {
                true => format!("re:{}\\..*_proj$", q.module.replace('.', "\\.")),
                false => q.module.clone(),
            };
            groups.entry((q.format, q.input)).or_default().push(target);
        }
        let several = groups.keys().map(|k| k.0).collect::<std::collections::BTreeSet<_>>().len() > 1;
        let (mut all, mut overall) = (Map::new(), "mixed-precision");
        for (number, ((format, input), targets)) in groups.into_iter().enumerate() {
            let nvfp4 = format == Format::Nvfp4;
            let name = if nvfp4 { "nvfp4-pack-quantized" } else { "naive-quantized" };
            if !several {
                overall = name;
            }
            let strategy = match format {
                Format::Nvfp4 => "tensor_group",
                Format::Fp8Row => "channel",
                _ => "tensor",
            };
            let args = json!({
                "num_bits": if nvfp4 { 4 } else { 8 }, "type": "float", "symmetric": true, "strategy": strategy,
                "group_size": nvfp4.then_some(16), "dynamic": false,
            });
            let mut activations = Value::Null;
            if input {
                activations = args.clone();
                activations["dynamic"] = if nvfp4 { json!("local") } else { json!(false) };
                activations["strategy"] = json!(if nvfp4 { "tensor_group" } else { "tensor" });
            }
            let group = json!({
                "format": name, "targets": targets, "weights": args, "input_activations": activations,
                "output_activations": null,
            });
            all.insert(format!("group_{number}"), group);
        }
        Ok(Some(json!({
            "quant_method": "compressed-tensors", "format": overall, "quantization_status": "compressed",
            "config_groups": all, "ignore": self.plain, "kv_cache_scheme": null,
        })))
    }

    fn config(&self, weights: &Weights) -> Result<Value, ConvertError> {
        let components = &self.setting.artifact.directory().components;
        let config = match self.setting.described {
            Described::Model(config) => config,
            Described::Drafter(config) => return Ok(Value::Object(config.to_config())),
        };
        let mut text = components.get("text").map(|c| c.config.clone()).unwrap_or_default();
        let class = text.remove("architectures").unwrap_or_default();
        for ours in ["ngram_table", "default_expert_activation"] {
            text.remove(ours);
        }
        text.insert("model_type".into(), json!(format!("{}_text", config.architecture.model_type())));
        if !self.setting.components.contains(&infernix_model::Component::Mtp) {
            // A configuration must not announce what the folder lacks.
            text.remove("mtp");
            text.insert("mtp_num_hidden_layers".into(), json!(0));
        }
        if !weights.tables.is_empty()
            && let Some(dtype) = match self.setting.row_format()? {
                Some(RowFormat::Fp8E4m3fn) => Some("float8_e4m3fn"),
                Some(RowFormat::Bf16) => Some("bfloat16"),
                _ => None,
            }
            && (text.contains_key("ple_embedding_dtype") || dtype != "bfloat16")
        {
            text.insert("ple_embedding_dtype".into(), json!(dtype));
        }
        let mut root = Map::new();
        root.insert("architectures".into(), class);
        root.insert("model_type".into(), json!(config.architecture.model_type()));
        root.insert("tie_word_embeddings".into(), json!(false));
        root.insert("text_config".into(), Value::Object(text));
        if self.setting.components.contains(&infernix_model::Component::Vision)
            && let Some(vision) = components.get("vision")
        {
            let mut tower = vision.config.clone();
            for key in VISION_KEYS {
                if let Some(value) = tower.remove(key) {
                    root.insert(key.into(), value);
                }
            }
            root.insert("vision_config".into(), Value::Object(tower));
        }
        Ok(Value::Object(root))
    }
}

/// All files of the checkpoint.
///
/// # Errors
/// What the format cannot hold, with the reasons.
pub(super) fn files(setting: &Setting<'_>, weights: &Weights) -> Result<Vec<OutFile>, ConvertError> {
    let mut b = Builder {
        setting,
        tensors: Vec::new(),
        quantized: Vec::new(),
        plain: Vec::new(),
        refused: Vec::new(),
    };
    for item in &weights.list {
        match item {
            Item::Weight(w) => b.weight(w),
            Item::Experts(e) => b.experts(e),
        }
    }
    for t in &weights.tables {
        b.table(t)?;
    }
    let quantization = b.quantization(weights)?;
    setting.refuse(&b.refused)?;
    let mut config = b.config(weights)?;
    if let Some(q) = &quantization {
        config["quantization_config"] = q.clone();
    }
    let mut out = shards(b.tensors, setting.shard_bytes);
    out.push(OutFile::bytes("config.json", pretty(&config)));
    if let Some(q) = quantization.filter(|q| q["quant_method"] == "modelopt") {
        let inner = json!({
            "quant_algo": q["quant_algo"], "quantized_layers": q["quantized_layers"], "exclude_modules": q["ignore"],
        });
        let file = json!({"producer": {"name": "modelopt"}, "quantization": inner});
        out.push(OutFile::bytes("hf_quant_config.json", pretty(&file)));
    }
    for (component, record) in &setting.artifact.directory().components {
        if setting.components.iter().any(|c| c.name() == component) {
            for role in record.resources.keys() {
                out.push(OutFile::bytes(role, setting.artifact.resource(component, role)?));
            }
        }
    }
    Ok(out)
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// Cuts a list of tensors into shards of at most `limit` bytes of data (one tensor may be more), with their index.
fn shards(tensors: Vec<OutTensor>, limit: u64) -> Vec<OutFile> {
    let mut groups: Vec<Vec<OutTensor>> = vec![Vec::new()];
    let (mut size, mut total) = (0u64, 0u64);
    for t in tensors {
        if size > 0 && size + t.bytes > limit {
            groups.push(Vec::new());
            size = 0;
        }
        (size, total) = (size + t.bytes, total + t.bytes);
        if let Some(group) = groups.last_mut() {
            group.push(t);
        }
    }
    let count = groups.len();
    let mut map = Map::new();
    let mut out = Vec::new();
    for (n, tensors) in groups.into_iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", n + 1),
        };
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for t in &tensors {
            let OutType::Hf(dtype) = t.ty else { continue };
            let entry = json!({"dtype": dtype, "shape": t.shape, "data_offsets": [at, at + t.bytes]});
            header.insert(t.name.clone(), entry);
            map.insert(t.name.clone(), json!(name));
            at += t.bytes;
        }
        let mut text = serde_json::to_vec(&header).unwrap_or_default();
        text.resize(text.len().next_multiple_of(8), b' ');
        let head = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
        out.push(OutFile { name, head, tensors, align: 1 });
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        out.push(OutFile::bytes("model.safetensors.index.json", pretty(&index)));
    }
    out
}
