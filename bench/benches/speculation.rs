//! What drafts gain on the bundled demo model, one request at a time on one CPU thread: prose, chat and tool calls, each answered
//! plainly and with drafts in turn, in one process. Prints one JSON document.
//!
//! `cargo bench -p infernix-bench --bench speculation`; `SPEC_REPEATS` sets how often each answer is timed (its best
//! time counts). Every arm must give the plain run's tokens.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the document and the progress")]

use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{ConvertOptions, Recipe, RunOptions, Silent, convert, plan};
use infernix_engine::EngineError;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheHints, Drain, Engine, EngineApi as _, EngineOptions, Event, Request, SpecMode, SpecOptions, Usage,
};
use infernix_text::{ChatFormat, ChatOptions, Message, Resources, Role, Tool};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// Tokens of an answer of prose; chats and tool calls end by themselves.
const PROSE: usize = 200;
const MOST: usize = 400;

const PROSE_STARTS: [&str; 4] = [
    "The container file begins with a header, and the directory lists every object with its offset and length. ",
    "To convert a checkpoint, give the folder and the recipe. The program reads each tensor once and ",
    "A request waits in the queue until a lane is free. When the memory is short, ",
    "The kernel reads the weights of a row, multiplies them with the activations and ",
];
const CHATS: [&str; 4] = [
    "Grace is 41 years old and lives in Oslo. Extract as JSON: name, city.",
    "Tom is 29 years old and lives in Lima. Extract as JSON: name, age, city.",
    "Is 17 larger than 12? Answer yes or no.",
    "Write the numbers from 3 to 12 as a JSON list.",
];
const TOOL_TURNS: [&str; 4] = [
    "Tell me the weather in Lisbon in fahrenheit.",
    "What is the weather in Oslo in celsius?",
    "How is the weather in Madrid today?",
    "Tell me the weather in Cairo in celsius.",
];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let demo = root.join("models/flash-demo-nvfp4");
    let folder = std::env::temp_dir().join(format!("infernix-speculation-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let document = measure(&demo, &folder);
    drop(std::fs::remove_dir_all(&folder));
    println!("{document:#}");
}

fn measure(demo: &Path, folder: &Path) -> Value {
    let out = folder.join("demo.infernix");
    let recipe = Recipe::load("qwen3_8_flash_next_nvfp4").expect("a built-in recipe");
    let made = plan(&ConvertOptions::new(demo, recipe, &out)).expect("a plan");
    let run = RunOptions { interrupt: Interrupt::default(), faults: None, durable: false };
    convert(&made, &Silent, &run).expect("a conversion");
    let artifact = Arc::new(Artifact::open(&out).expect("the artifact"));
    let format = ChatFormat::new(&Resources::from_folder(demo).expect("the tokenizer")).expect("a template");
    let spec = |mode, draft_tokens| SpecOptions { mode, draft_tokens, ..SpecOptions::default() };
    let arms = [
        ("plain", spec(SpecMode::Off, None)),
        ("mtp 1", spec(SpecMode::Mtp, Some(1))),
        ("mtp 3", spec(SpecMode::Mtp, Some(3))),
        ("auto", spec(SpecMode::Auto, None)),
    ];
    let engines: Vec<Engine> = arms.iter().map(|a| start(&artifact, a.1)).collect();
    let repeats = std::env::var("SPEC_REPEATS").ok().and_then(|n| n.parse().ok()).unwrap_or(5).max(1);
    let mut kinds = serde_json::Map::new();
    for (kind, prompts) in prompts(&format) {
        let mut best = vec![vec![f64::INFINITY; prompts.len()]; arms.len()];
        let mut usage = vec![Usage::default(); arms.len()];
        let mut answers: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
        for repeat in 0..repeats {
            for (p, prompt) in prompts.iter().enumerate() {
                // Arms take turns in a rotating order, so that a disturbance of the machine meets all of them.
                for a in (0..arms.len()).map(|a| (a + repeat + p) % arms.len()) {
                    let most = if kind == "prose" { PROSE } else { MOST };
                    let stops = if kind == "prose" { Vec::new() } else { format.stop_ids() };
                    let (text, used, seconds) = ask(&engines[a], prompt, most, stops);
                    if answers[p].is_empty() {
                        answers[p].clone_from(&text);
                    }
                    assert_eq!(text, answers[p], "{kind} {p}: {} changed the text", arms[a].0);
                    best[a][p] = best[a][p].min(seconds);
                    if repeat == 0 {
                        let u = &mut usage[a];
                        u.rounds += used.rounds;
                        u.drafted += used.drafted;
                        u.accepted += used.accepted;
                    }
                }
            }
            eprintln!("{kind}: {} of {repeats}", repeat + 1);
        }
        let seconds: Vec<f64> = best.iter().map(|b| b.iter().sum()).collect();
        let of_arm = |a: usize| {
            let u = &usage[a];
            let share = (u.drafted > 0).then(|| u.accepted as f64 / u.drafted as f64);
            json!({
                "rounds": u.rounds, "drafted": u.drafted, "accepted": u.accepted, "acceptance": share,
                "tokens_per_round": (u.rounds + u.accepted) as f64 / u.rounds.max(1) as f64,
                "decode_seconds": seconds[a], "speed_up": seconds[0] / seconds[a],
            })
        };
        let list: serde_json::Map<_, _> =
            arms.iter().enumerate().map(|(a, arm)| (arm.0.to_owned(), of_arm(a))).collect();
        let tokens: usize = answers.iter().map(Vec::len).sum();
        kinds.insert(kind.into(), json!({"prompts": prompts.len(), "tokens": tokens, "arms": list}));
    }
    engines.iter().for_each(|e| e.shutdown(Drain::Now));
    json!({
        "schema_version": 1, "kind": "speculation", "model": "flash-demo-nvfp4", "backend": "cpu", "threads": 1,
        "sampling": "greedy", "repeats": repeats, "kinds": kinds,
    })
}

fn prompts(format: &ChatFormat) -> [(&'static str, Vec<Vec<u32>>); 3] {
    let chat = |text: &str, tools: &[Tool]| {
        let messages = [Message::text(Role::User, text)];
        format.prompt(&messages, tools, &ChatOptions::default()).expect("a prompt").ids
    };
    let weather = Tool::function(
        "get_weather",
        "Current weather of a city",
        json!({"type": "object", "properties": {
            "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}
        }, "required": ["city"]}),
    );
    [
        ("prose", PROSE_STARTS.iter().map(|t| format.tokenizer().encode(t).expect("text")).collect()),
        ("chat", CHATS.iter().map(|t| chat(t, &[])).collect()),
        ("tool calls", TOOL_TURNS.iter().map(|t| chat(t, std::slice::from_ref(&weather))).collect()),
    ]
}

fn start(artifact: &Arc<Artifact>, spec: SpecOptions) -> Engine {
    let artifact = Arc::clone(artifact);
    let make = move || -> Result<Driver<CpuBackend>, EngineError> {
        let cpu = CpuOptions { threads: 1, threads_batch: 1, ..CpuOptions::default() };
        let source = ArtifactSource::new(Arc::clone(&artifact))?;
        let drafter = spec.mode != SpecMode::Off;
        let model = load(CpuBackend::new(cpu), &source, LoadOptions { drafter, ..LoadOptions::default() })?;
        let ngram = open_ngram(&artifact, None, NgramOptions::default())?.map(|n| n.0);
        Driver::new(model, ngram, DriverOptions { tokens: 2048, ..DriverOptions::default() })
    };
    Engine::start(EngineOptions { spec, ..EngineOptions::default() }, make).expect("the engine starts")
}

/// The answer, its counts, and the seconds that decoding took.
fn ask(engine: &Engine, prompt: &[u32], max_tokens: usize, stop_tokens: Vec<u32>) -> (Vec<u32>, Usage, f64) {
    let (sender, events) = channel();
    let request = Request {
        prompt: prompt.to_vec(),
        sampling: SamplerOptions::default(),
        max_tokens,
        stop_tokens,
        cache: CacheHints { bypass: true, ..CacheHints::default() },
        ..Request::default()
    };
    engine.submit(request, Box::new(move |e| drop(sender.send(e)))).expect("a place in the queue");
    let mut text = Vec::new();
    loop {
        match events.recv().expect("an end") {
            Event::Tokens(t) => text.extend(t.iter().map(|t| t.id)),
            Event::Finished { usage, timings, .. } => return (text, usage, timings.decode.as_secs_f64()),
            Event::Failed(e) => panic!("{e}"),
            _ => {}
        }
    }
}
