//! `synth`: a checkpoint in the layout of the Flash-Next ModelOpt-NVFP4 release, or of the 122B mixture's, of its real
//! geometry but as deep as wanted, filled with deterministic words. What it holds means nothing; every word is legal.

mod fill;
mod geometry;
mod moe;
mod ngram;
mod write;

use std::path::{Path, PathBuf};

pub(crate) use geometry::{Family, Geometry, Tensor};

const HELP: &str = "\
usage: cargo xtask synth OUT [OPTIONS]

Writes a synthetic ModelOpt-NVFP4 Flash-Next checkpoint of the real geometry into the new folder OUT.
The same options give the same bytes. Defaults write about 3.3 GB.

  --model NAME      flash (default), 122b (Qwen3.5-122B-A10B: NVFP4 experts, FP8 projections) or 122b-small (a toy of it)
  --layers N        decoder layers, at least 2 (default 2; the releases have 48)
  --experts N       routed experts per layer, at least 10 (default 512; 122b: 256, 122b-small: 16)
  --vocab N         vocabulary rows (default: that of the tokenizer's own config; the release has 248320)
  --ngram-base N    smallest prime of the n-gram table (default 20000, 51 MB; the release has 20000000, 51 GB)
  --mtp             the drafter, 512 block-FP8 experts, 2.6 GB more
  --vision          the image tower, BF16, 0.9 GB more
  --shard-bytes N   data bytes per shard (default 2000000000)
  --seed N          other words (default 1)
  --headers-only    headers without data, for plans
  --tokenizer DIR   where tokenizer files come from (default models/flash-demo-nvfp4)";

/// Why a chore failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Wrong arguments: exit code 2.
    Usage(String),
    /// Anything else: exit code 1.
    Failed(String),
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self::Failed(text)
    }
}

/// What to write.
pub(crate) struct Options {
    pub(crate) out: PathBuf,
    pub(crate) tokenizer: PathBuf,
    pub(crate) shard_bytes: u64,
    pub(crate) seed: u64,
    pub(crate) headers_only: bool,
    pub(crate) geometry: Geometry,
}

/// Parses the arguments and writes the folder.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    if args.iter().any(|a| a == "--help" || a == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let options = parse(args)?;
    write::write(&options)
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let usage = |text: String| Failure::Usage(format!("{text}\n\n{HELP}"));
    let mut out = None;
    // The crate that compiles this lies at any depth below the repository's root: tests of `convert` use it too.
    let demo = |folder: &Path| Some(folder.join("models/flash-demo-nvfp4")).filter(|demo| demo.is_dir());
    let mut tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find_map(demo).unwrap_or_default();
    let (mut layers, mut experts, mut vocab, mut base) = (2u64, None, None, 20_000u64);
    let mut family = Family::Flash;
    let (mut shard_bytes, mut seed) = (2_000_000_000u64, 1u64);
    let (mut mtp, mut vision, mut headers_only) = (false, false, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| usage(format!("{arg} needs a value")));
        let number = |text: &String| {
            text.replace('_', "").parse::<u64>().map_err(|_| usage(format!("{arg}: {text:?} is no number")))
        };
        match arg.as_str() {
            "--layers" => layers = number(value()?)?,
            "--experts" => experts = Some(number(value()?)?),
            "--model" => {
                family = match value()?.as_str() {
                    "flash" => Family::Flash,
                    "122b" => Family::Moe { small: false },
                    "122b-small" => Family::Moe { small: true },
                    other => return Err(usage(format!("--model: there is no {other:?}"))),
                }
            }
            "--vocab" => vocab = Some(number(value()?)?),
            "--ngram-base" => base = number(value()?)?,
            "--shard-bytes" => shard_bytes = number(value()?)?,
            "--seed" => seed = number(value()?)?,
            "--tokenizer" => tokenizer = value()?.into(),
            "--mtp" => mtp = true,
            "--vision" => vision = true,
            "--headers-only" => headers_only = true,
            flag if flag.starts_with('-') => return Err(usage(format!("unknown option {flag}"))),
            path if out.is_none() => out = Some(PathBuf::from(path)),
            extra => return Err(usage(format!("unexpected argument {extra:?}"))),
        }
    }
    let out = out.ok_or_else(|| usage("OUT is missing".to_owned()))?;
    let tokens = Tokens::read(&tokenizer)?;
    let vocab = vocab.unwrap_or(tokens.vocab);
    let experts = experts.unwrap_or(match family {
        Family::Flash => 512,
        Family::Moe { small } => {
            if small {
                16
            } else {
                256
            }
        }
    });
    if family != Family::Flash && vision {
        return Err(usage("--vision: the mixture is written without its tower".to_owned()));
    }
    // The table is in layer 1; ten experts are picked per token.
    for (name, value, least, most) in [
        ("--layers", layers, 2, 1_000),
        ("--experts", experts, 10, 4_096),
        ("--vocab", vocab, 1, 1 << 24),
        ("--ngram-base", base, 100, 1 << 32),
        ("--shard-bytes", shard_bytes, 1 << 20, u64::MAX),
    ] {
        if !(least..=most).contains(&value) {
            return Err(usage(format!("{name} must be {least} to {most}, found {value}")));
        }
    }
    let geometry = Geometry { family, layers, experts, vocab, base, mtp, vision, tokens };
    Ok(Options { out, tokenizer, shard_bytes, seed, headers_only, geometry })
}

/// Ids of special tokens in the tokenizer that is copied, and the size of its vocabulary.
pub(crate) struct Tokens {
    pub(crate) vocab: u64,
    pub(crate) eos: u64,
    pub(crate) image: u64,
    pub(crate) video: u64,
    pub(crate) vision_start: u64,
    pub(crate) vision_end: u64,
}

impl Tokens {
    fn read(folder: &Path) -> Result<Self, String> {
        let path = folder.join("config.json");
        let text = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let config: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        let id = |at: &str| {
            config
                .pointer(at)
                .and_then(serde_json::Value::as_u64)
                .ok_or_else(|| format!("{}: {at} is missing", path.display()))
        };
        Ok(Self {
            vocab: id("/text_config/vocab_size")?,
            eos: id("/text_config/eos_token_id")?,
            image: id("/image_token_id")?,
            video: id("/video_token_id")?,
            vision_start: id("/vision_start_token_id")?,
            vision_end: id("/vision_end_token_id")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn options(args: &[&str]) -> Result<Options, Failure> {
        parse(&args.iter().map(|a| a.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_checked() {
        let o = options(&["out", "--layers", "3", "--mtp", "--shard-bytes", "2_000_000"]).expect("valid");
        assert_eq!(
            (o.geometry.layers, o.geometry.experts, o.geometry.mtp, o.shard_bytes),
            (3, 512, true, 2_000_000)
        );
        for bad in [
            &["out", "--layers", "1"][..],
            &[],
            &["a", "b"],
            &["out", "--layers"],
            &["out", "--nope"],
            &["out", "--seed", "x"],
        ] {
            assert!(matches!(options(bad), Err(Failure::Usage(_))), "{bad:?}");
        }
    }

    #[test]
    fn small_folder_is_complete_and_the_same_every_time() {
        let dir = std::env::temp_dir().join(format!("synth-test-{}", std::process::id()));
        let mut folders = Vec::new();
        for n in ["a", "b"] {
            let out = dir.join(n);
            let mut o = options(&[
                &out.to_string_lossy(),
                "--experts",
                "10",
                "--ngram-base",
                "100",
                "--vocab",
                "4096",
                "--shard-bytes",
                "100000000",
            ])
            .expect("valid");
            // Headers are enough to compare names and layout; words are compared in `fill`.
            o.headers_only = true;
            write::write(&o).expect("written");
            let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(&out)
                .expect("listed")
                .map(|e| {
                    let e = e.expect("entry");
                    (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).expect("read"))
                })
                .collect();
            files.sort();
            assert!(matches!(write::write(&o), Err(Failure::Failed(_))), "an existing checkpoint is kept");
            folders.push(files);
        }
        std::fs::remove_dir_all(&dir).expect("removed");
        assert!(folders[0] == folders[1]);
        let names: Vec<&str> = folders[0].iter().map(|(n, _)| n.as_str()).collect();
        for needed in [
            "config.json",
            "hf_quant_config.json",
            "model-fp8-mtp-ple.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ] {
            assert!(names.contains(&needed), "{needed} in {names:?}");
        }
        for (name, bytes) in &folders[0] {
            if name.ends_with(".json") {
                serde_json::from_slice::<serde_json::Value>(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
    }
}
