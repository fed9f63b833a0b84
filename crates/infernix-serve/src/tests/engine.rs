//! The server over the engine's own thread and scheduler: panics planted in the middle of streams, and what those who
//! run the server may tell it.

use super::checker;
use super::client::{Answer, CONTEXT, FORMAT, Server};
use crate::options::{ApiKey, ServeOptions};
use infernix_engine::EngineError;
use infernix_engine::driver::{DraftLane, Image, LaneInput, LaneOutput, Sequence, Want};
use infernix_engine::sample::{NoToken, Sampler};
use infernix_engine::sched::{
    CacheOptions, CacheOrder, Constraint, Drain, Engine, EngineApi, EngineOptions, Limits, Request,
    RequestId, Runner, ScriptedEngine, Sink, Status, SubmitError,
};
use infernix_engine::sim::{SimModel, SimOptions};
use infernix_engine::state::KvPool;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Where a panic is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Decode,
    Commit,
    Choose,
    Reserve,
    /// Outside of model calls, where the engine looks at itself.
    Settled,
    Now,
    Close,
    /// In the request's own constraint.
    Constraint,
}

/// A simulated model that panics once, at a place that is reached often, once the countdown has been started and has
/// run out.
struct Faulty {
    model: SimModel,
    place: Place,
    left: Arc<AtomicUsize>,
}

/// Countdown that has not been started.
const IDLE: usize = usize::MAX;

fn reach(place: Place, planted: Place, left: &AtomicUsize) {
    if place != planted || left.load(Ordering::SeqCst) == IDLE {
        return;
    }
    if left.fetch_sub(1, Ordering::SeqCst) == 0 {
        left.store(IDLE, Ordering::SeqCst);
        panic!("planted in {place:?}");
    }
}

impl Faulty {
    fn reach(&self, place: Place) {
        reach(place, self.place, &self.left);
    }
}

impl Runner for Faulty {
    type State = u64;

    fn limits(&self) -> Limits {
        self.model.limits()
    }

    fn pool(&mut self) -> &mut KvPool {
        self.model.pool()
    }

    fn free_slots(&self) -> usize {
        self.model.free_slots()
    }

    fn open(&mut self, stream: u64) -> Result<Sequence, EngineError> {
        self.model.open(stream)
    }

    fn close(&mut self, s: Sequence) {
        self.reach(Place::Close);
        self.model.close(s);
    }

    fn image(&mut self, s: &mut Sequence) -> Result<Image<u64>, EngineError> {
        self.model.image(s)
    }

    fn state_bytes(&self, image: &Image<u64>) -> u64 {
        self.model.state_bytes(image)
    }

    fn attach(
        &mut self,
        s: &mut Sequence,
        ids: &[u32],
        pages: Vec<u32>,
        image: &Image<u64>,
    ) -> Result<(), EngineError> {
        self.model.attach(s, ids, pages, image)
    }

    fn reserve(&mut self, s: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        self.reach(Place::Reserve);
        self.model.reserve(s, tokens)
    }

    fn prefill(&mut self, s: &mut Sequence, ids: &[u32], want: Want) -> Result<LaneOutput, EngineError> {
        self.model.prefill(s, ids, want)
    }

    fn decode(
        &mut self,
        lanes: &mut [LaneInput<'_>],
    ) -> Result<Vec<Result<LaneOutput, String>>, EngineError> {
        self.reach(Place::Decode);
        // Slow enough that a stream is read while it is made.
        std::thread::sleep(Duration::from_millis(1));
        self.model.decode(lanes)
    }

    fn commit(&mut self, s: &mut Sequence, n: usize) -> Result<(), EngineError> {
        self.reach(Place::Commit);
        self.model.commit(s, n)
    }

    fn draft(&mut self, lanes: &mut [DraftLane<'_>]) -> Result<(), EngineError> {
        self.model.draft(lanes)
    }

    fn settled(&self, s: &Sequence) -> usize {
        self.reach(Place::Settled);
        self.model.settled(s)
    }

    fn save_page(&mut self, page: u32) -> Result<Vec<u8>, EngineError> {
        self.model.save_page(page)
    }

    fn load_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), EngineError> {
        self.model.load_page(page, bytes)
    }

    fn save_state(&mut self, state: &u64) -> Result<Vec<u8>, EngineError> {
        self.model.save_state(state)
    }

    fn load_state(&mut self, bytes: &[u8]) -> Result<u64, EngineError> {
        self.model.load_state(bytes)
    }

    fn now(&self) -> Duration {
        self.reach(Place::Now);
        self.model.now()
    }

    fn choose(
        &self,
        sampler: &Sampler,
        row: &[f32],
        mask: Option<&[u32]>,
        position: u64,
    ) -> Result<u32, NoToken> {
        self.reach(Place::Choose);
        self.model.choose(sampler, row, mask, position)
    }
}

/// Allows everything, until it panics.
struct Trap(Place, Arc<AtomicUsize>);

impl Constraint for Trap {
    fn mask(&mut self, _: &mut [u32]) -> Result<(), String> {
        reach(Place::Constraint, self.0, &self.1);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        reach(Place::Constraint, self.0, &self.1);
        Ok(())
    }

    fn rollback(&mut self, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        ids.len()
    }

    fn finished(&self) -> bool {
        false
    }
}

/// The engine; every request goes through the trap where that is the place.
struct Trapped(Engine, Place, Arc<AtomicUsize>);

impl EngineApi for Trapped {
    fn submit(&self, mut request: Request, sink: Sink) -> Result<RequestId, SubmitError> {
        if self.1 == Place::Constraint {
            request.constraint = Some(Box::new(Trap(self.1, Arc::clone(&self.2))));
        }
        self.0.submit(request, sink)
    }

    fn cancel(&self, id: RequestId) {
        self.0.cancel(id);
    }

    fn status(&self) -> Status {
        self.0.status()
    }

    fn shutdown(&self, drain: Drain) {
        self.0.shutdown(drain);
    }

    fn cache(&self, order: CacheOrder) -> Result<usize, String> {
        self.0.cache(order)
    }
}

/// A server over a simulated model with a panic in it; the countdown is not started.
fn server(place: Place, cache: CacheOptions, serve: ServeOptions) -> (Server, Arc<AtomicUsize>) {
    over(place, EngineOptions { max_concurrency: 2, cache, ..EngineOptions::default() }, serve)
}

/// The same with settings of the engine.
fn over(place: Place, options: EngineOptions, serve: ServeOptions) -> (Server, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(IDLE));
    let addressable = FORMAT.tokenizer().addressable() as usize;
    let options = EngineOptions { max_context: CONTEXT, addressable, ..options };
    let sim = SimOptions {
        pages: 2 * CONTEXT / 64,
        sequences: 2,
        vocab: addressable,
        max_positions: CONTEXT,
        ..SimOptions::default()
    };
    let counted = Arc::clone(&left);
    let make = move || Ok(Faulty { model: SimModel::new(sim), place, left: counted });
    let engine = Engine::start(options, make).expect("an engine");
    let unused = ScriptedEngine::new(|_| Err(SubmitError::Invalid("not used".into())));
    let server = Server::over(serve, unused, Arc::new(Trapped(engine, place, Arc::clone(&left))));
    (server, left)
}

/// A stream of each protocol: the request, and whether its answer ended as a well-formed failure.
type Ask = (&'static str, Value, fn(&str) -> bool);

fn asks() -> [Ask; 4] {
    let user = json!([{"role": "user", "content": "Say something long."}]);
    [
        (
            "/v1/chat/completions",
            json!({"messages": user, "stream": true, "max_tokens": 400, "ignore_eos": true, "seed": 1}),
            |body| checker::chat(body, 1, false).expect("well-formed")[0].failed,
        ),
        (
            "/v1/responses",
            json!({"input": "Say something long.", "stream": true, "max_output_tokens": 400, "ignore_eos": true, "seed": 1}),
            |body| checker::responses(body).expect("well-formed").0.failed,
        ),
        (
            "/v1/messages",
            json!({"model": "m", "messages": user, "stream": true, "max_tokens": 400, "ignore_eos": true, "seed": 1}),
            |body| checker::messages(body).expect("well-formed").failed,
        ),
        (
            "/v1/completions",
            json!({"prompt": "Once", "stream": true, "max_tokens": 400, "ignore_eos": true, "seed": 1}),
            |body| {
                let frames = checker::frames(body).expect("well-formed");
                let last = frames.last().map(|(_, data)| data.as_str()).unwrap_or_default();
                last != "[DONE]" && serde_json::from_str::<Value>(last).expect("JSON").get("error").is_some()
            },
        ),
    ]
}

/// A short question, and whether `/readyz` agrees with its answer.
fn next(server: &Server) -> Answer {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "ignore_eos": true});
    let answer = server.post("/v1/chat/completions", &body);
    let ready = server.get("/readyz").status;
    let metrics = server.get("/metrics").body;
    match answer.status {
        200 => {
            assert_eq!(ready, 200);
            assert!(metrics.contains("infernix_engine_ready 1"));
        }
        503 => {
            assert_eq!((ready, answer.code().as_str()), (503, "service_unavailable"));
            assert!(answer.header("retry-after").is_some() && metrics.contains("infernix_engine_ready 0"));
        }
        other => panic!("{other}: {}", answer.body),
    }
    answer
}

#[test]
fn a_panic_of_the_engine_in_a_stream_ends_it_with_the_protocols_error_and_the_next_request_is_answered() {
    use Place as P;
    let places = [P::Decode, P::Commit, P::Choose, P::Reserve, P::Settled, P::Now, P::Close, P::Constraint];
    for place in places {
        for (path, body, failed) in asks() {
            let (mut server, left) = server(place, CacheOptions::default(), ServeOptions::default());
            assert_eq!(next(&server).status, 200, "{place:?}: nothing has happened yet");
            // Requests end once: the panic must come while one is at work.
            left.store(if place == P::Close { 0 } else { 30 }, Ordering::SeqCst);
            let answer = server.post(path, &body);
            if answer.status == 200 {
                let ended = failed(&answer.body);
                assert!(ended || place == P::Close, "{place:?} {path}: {}", answer.body);
            } else {
                assert!(matches!(answer.status, 500 | 503), "{place:?} {path}: {}", answer.status);
            }
            let after = next(&server);
            // What a model call or a request's own constraint does is that request's matter.
            if matches!(place, P::Decode | P::Commit | P::Choose | P::Constraint) {
                assert_eq!(after.status, 200, "{place:?} {path}: {}", after.body);
            }
            let deadline = Instant::now() + Duration::from_secs(30);
            while server.app.active_requests() > 0 {
                assert!(Instant::now() < deadline, "{place:?} {path}: a request is left");
                std::thread::sleep(Duration::from_millis(2));
            }
            server.join();
        }
    }
}

#[test]
fn a_panic_costs_nobody_else_their_answer() {
    let (server, left) = server(Place::Constraint, CacheOptions::default(), ServeOptions::default());
    let (path, body, failed) = &asks()[0];
    // Both run at once; the trap goes off in one of them.
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..2).map(|_| scope.spawn(|| server.post(path, body))).collect();
        std::thread::sleep(Duration::from_millis(50));
        left.store(20, Ordering::SeqCst);
        asked.into_iter().map(|a| a.join().expect("an answer")).collect()
    });
    let failures = answers.iter().filter(|a| a.status != 200 || failed(&a.body)).count();
    assert_eq!(failures, 1, "{:?}", answers.iter().map(|a| &a.body).collect::<Vec<_>>());
    assert_eq!(next(&server).status, 200);
}

#[test]
fn those_who_run_the_server_drain_it_and_save_and_empty_its_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("cache");
    let cache = CacheOptions { file: Some(file.clone()), ..CacheOptions::default() };
    let (server, _) = server(Place::Nowhere, cache, ServeOptions::default());
    let body = json!({"prompt": "word ".repeat(300), "max_tokens": 4, "ignore_eos": true});
    let cached = || {
        let answer = server.post("/v1/completions", &body).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached(), 0);
    assert!(cached() > 0);
    let saved = server.tell("/admin/cache/save").json();
    assert!(saved["saved"].as_u64() > Some(0) && file.is_file(), "{saved}");
    assert!(server.tell("/admin/cache/clear").json()["dropped"].as_u64() > Some(0));
    assert_eq!(cached(), 0);

    assert_eq!(server.tell("/admin/drain").json(), json!({"draining": true, "active_requests": 0}));
    assert_eq!((server.get("/readyz").status, server.get("/livez").status), (503, 200));
    assert_eq!(server.post("/v1/completions", &body).code(), "service_unavailable");
    assert_eq!(server.tell("/admin/resume").json()["draining"], false);
    assert!(cached() > 0);

    // A body that says anything else was not meant for this.
    for body in ["", "{", "[]", "{\"draining\": false}"] {
        for path in ["/admin/drain", "/admin/resume", "/admin/cache/save", "/admin/cache/clear"] {
            let headers = [("content-type", "application/json")];
            let answer = server.request_at(server.admin, "POST", path, &headers, body.as_bytes());
            assert_eq!((answer.status, server.get("/readyz").status), (400, 200), "{path} {body}");
        }
    }
    assert!(cached() > 0);

    // Only there, and only for those who may.
    for path in ["/admin/drain", "/admin/cache/clear"] {
        assert_eq!(server.post(path, &json!({})).status, 404);
    }
    let evil = [("content-type", "application/json"), ("origin", "http://evil.example")];
    assert_eq!(server.request_at(server.admin, "POST", "/admin/drain", &evil, b"{}").status, 403);
    let rebound = [("content-type", "application/json"), ("host", "evil.example")];
    assert_eq!(server.request_at(server.admin, "POST", "/admin/drain", &rebound, b"{}").status, 403);
    assert_eq!(server.request_at(server.admin, "POST", "/admin/drain", &[], b"").status, 415);
    assert_eq!(server.request_at(server.admin, "GET", "/metrics", &[], b"").status, 200);
    assert_eq!(server.request_at(server.admin, "POST", "/v1/completions", &evil[..1], b"{}").status, 404);
}

#[test]
fn a_key_sees_neither_in_time_nor_in_words_what_another_key_has_sent() {
    let key = |name: &str| ApiKey { name: name.into(), key: format!("secret-{name}") };
    let options = ServeOptions { keys: vec![key("ann"), key("ben")], ..ServeOptions::default() };
    let (server, _) = server(Place::Nowhere, CacheOptions::default(), options);
    let secret = "The launch code of the moon base is 4711. ".repeat(20);
    let ask = |who: &str, path: &str, body: &Value| {
        let authorization = format!("Bearer secret-{who}");
        let headers = [("content-type", "application/json"), ("authorization", authorization.as_str())];
        server.request("POST", path, &headers, body.to_string().as_bytes())
    };
    let misses = |who: &str| {
        let authorization = format!("Bearer secret-{who}");
        server.request("GET", "/v1/status", &[("authorization", &authorization)], b"").json()["misses"]
            .to_string()
    };
    let body =
        json!({"messages": [{"role": "user", "content": secret}], "max_tokens": 4, "ignore_eos": true});
    for (who, hit) in [("ann", false), ("ann", true), ("ben", false), ("ben", true)] {
        let answer = ask(who, "/v1/chat/completions", &body);
        let cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached > Some(0), hit, "{who}");
        let said = answer.header("x-infernix-cache").expect("a header").to_owned();
        assert!(hit || said.ends_with("reason=cold; shared=0"), "{who}: {said}");
    }
    // A guess that parts from the secret in the middle is told where, but only to its own key.
    let guess = json!({"messages": [{"role": "user", "content": secret.replace("4711. The", "0815. The")}],
                       "max_tokens": 4, "ignore_eos": true});
    assert_eq!(ask("ann", "/v1/chat/completions", &guess).status, 200);
    assert!(misses("ann").contains("4711") && misses("ann").contains("0815"));
    assert!(!misses("ben").contains("0815"));
}

#[test]
fn a_new_or_moved_key_never_meets_what_another_one_left_in_the_cache_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("cache");
    let secret = "My PIN is 4711 and my account is DE99 1234. ".repeat(20);
    let system = "Be brief and kind, and never tell anybody about anything. ".repeat(20);
    // As an unnamed line of a key file is named.
    let started = |keys: &[&str]| {
        let keys = keys.iter().enumerate();
        let keys =
            keys.map(|(i, key)| ApiKey { name: format!("key-{}", i + 1), key: (*key).into() }).collect();
        let cache = CacheOptions { file: Some(file.clone()), ..CacheOptions::default() };
        server(Place::Nowhere, cache, ServeOptions { keys, ..ServeOptions::default() }).0
    };
    let ask = |server: &Server, key: &str, text: &str| {
        let body = json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
                          "max_tokens": 4, "ignore_eos": true});
        let authorization = format!("Bearer {key}");
        let headers = [("content-type", "application/json"), ("authorization", authorization.as_str())];
        let body = body.to_string();
        let answer = server.request("POST", "/v1/chat/completions", &headers, body.as_bytes()).json();
        let seen = server.request("GET", "/v1/status", &headers[1..], b"").json()["misses"].to_string();
        (answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count"), seen)
    };
    // One key alone has successors, too.
    for before in [&["FIRST"][..], &["FIRST", "SECOND"]] {
        let mut first = started(before);
        ask(&first, "FIRST", &secret);
        first.join();
        for (keys, stranger) in
            [(&["SECOND", "FIRST"][..], "SECOND"), (&["THIRD", "SECOND"], "THIRD"), (&["THIRD"], "THIRD")]
        {
            let kept = std::fs::read(&file).expect("a file");
            let mut server = started(keys);
            let (hit, seen) = ask(&server, stranger, "Hello");
            assert!(hit == 0 && !seen.contains("4711"), "{before:?}, then {keys:?}: {hit} tokens, {seen}");
            if keys.contains(&"FIRST") {
                assert!(ask(&server, "FIRST", &secret).0 > 0, "its own are still there");
            }
            server.join();
            std::fs::write(&file, kept).expect("written");
        }
        std::fs::remove_file(&file).expect("removed");
    }
}

#[test]
fn the_answers_of_one_request_queue_among_themselves() {
    let options = EngineOptions {
        max_concurrency: 1,
        max_pending_requests: 3,
        pending_timeout: Duration::from_millis(5),
        ..EngineOptions::default()
    };
    let (server, _) = over(Place::Nowhere, options, ServeOptions::default());
    // By the model's clock an answer takes 160 ms at least.
    let chat =
        json!({"messages": [{"role": "user", "content": "x"}], "n": 5, "max_tokens": 20, "ignore_eos": true});
    let prompts: Vec<String> = (0..20).map(|i| format!("prompt {i}")).collect();
    let batch = json!({"prompt": prompts, "n": 2, "max_tokens": 20, "ignore_eos": true});
    let scored =
        json!({"prompt": prompts[..3], "echo": true, "logprobs": 1, "max_tokens": 1, "ignore_eos": true});
    let noul = json!({"type": "noul", "instructions": "x"});
    let decide = json!({"state": "s", "questions": {"a": noul, "b": noul, "c": noul}});
    for (path, body, choices) in
        [("/v1/chat/completions", &chat, 5), ("/v1/completions", &batch, 40), ("/v1/completions", &scored, 3)]
    {
        let answer = server.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        let answer = answer.json();
        let all = answer["choices"].as_array().expect("a list");
        assert!(all.len() == choices && all.iter().all(|c| c["finish_reason"] == "length"), "{answer}");
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        if body["echo"] != true {
            let answer = server.post(path, &streamed);
            let ends = answer.body.matches("\"finish_reason\":\"length\"").count();
            assert_eq!((ends, answer.body.ends_with("data: [DONE]\n\n")), (choices, true), "{}", answer.body);
        }
    }
    let answers = server.post("/v1/decide", &decide).json()["answers"].clone();
    assert!(answers.as_object().expect("answers").values().all(|a| a["type"] == "noul"), "{answers}");
}

#[test]
fn what_was_read_is_never_told_as_cached() {
    let (server, _) = server(Place::Nowhere, CacheOptions::default(), ServeOptions::default());
    let told = |answer: &Answer| {
        let usage = answer.json()["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        (
            cached,
            usage["prompt_tokens"].as_u64().expect("a count"),
            answer.header("x-infernix-cache").expect("one").to_owned(),
        )
    };
    let words = |name: &str| format!("{name} {}", "word ".repeat(90));
    let scored =
        json!({"prompt": words("a"), "echo": true, "logprobs": 1, "max_tokens": 1, "ignore_eos": true});
    for _ in 0..2 {
        let answer = server.post("/v1/completions", &scored);
        let (cached, prompt, header) = told(&answer);
        assert_eq!(cached, 0, "scores are read from the first token on");
        assert!(header.starts_with(&format!("hit=0/{prompt}; reason=bypassed")), "{header}");
        let timings = answer.json()["timings"].clone();
        assert_eq!((&timings["cache_n"], &timings["prompt_n"]), (&json!(0), &json!(prompt)));
    }
    let several = json!({"messages": [{"role": "user", "content": words("b")}], "n": 3, "max_tokens": 4, "ignore_eos": true});
    let (cached, prompt, header) = told(&server.post("/v1/chat/completions", &several));
    assert_eq!((cached, header.split(';').next()), (0, Some(format!("hit=0/{prompt}").as_str())));
    let batch = json!({"prompt": [words("c"), words("c"), words("d")], "max_tokens": 4, "ignore_eos": true});
    let (cached, prompt, header) = told(&server.post("/v1/completions", &batch));
    assert!(cached > 0 && header == format!("hit={cached}/{prompt}; prompts=3/3"), "{header}");
}

/// Seen: two texts that part in the bytes of a character were shown as the same one, U+FFFD.
#[test]
fn a_miss_shows_the_characters_that_differ() {
    let (server, _) = server(Place::Nowhere, CacheOptions::default(), ServeOptions::default());
    let rules: String = (0..60).map(|i| format!("rule {i} says be careful with item {}. ", i * 7)).collect();
    for (a, b) in [("😀", "😁"), ("ж", "з"), ("中", "丰")] {
        for mood in [a, b] {
            let prompt = format!("In mood {mood} now. {rules}");
            server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true}));
        }
        let miss = server.get("/v1/status").json()["misses"][0].clone();
        for (side, mood) in [("cached", a), ("prompt", b)] {
            let shown = miss[side]["different"].as_str().expect("a text");
            assert!(shown.trim_start().starts_with(mood), "{mood}: {miss}");
        }
        assert!(!miss.to_string().contains('\u{FFFD}'), "{miss}");
    }
}

#[test]
fn a_miss_names_the_clients_habit_and_never_calls_a_known_prompt_new() {
    let (server, _) = server(Place::Nowhere, CacheOptions::default(), ServeOptions::default());
    let rules: String = (0..60).map(|i| format!("rule {i} says be careful with item {}. ", i * 7)).collect();
    let ask = |system: &str, user: &str| {
        let body = json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
                          "max_tokens": 2, "ignore_eos": true});
        let answer = server.post("/v1/chat/completions", &body);
        let miss = server.get("/v1/status").json()["misses"][0].clone();
        let own = miss["request"] == answer.header("x-request-id").expect("an id");
        let habit = own.then(|| miss["habit"].as_str().map(str::to_owned)).flatten();
        (answer.header("x-infernix-cache").expect("a header").to_owned(), habit)
    };
    for (stamp, name, words) in [
        ("It is 2026-11-30T20:31:0N.", "clock", "clock or date"),
        ("Today is N December 2026.", "clock", "clock or date"),
        ("ts 179607000N.", "clock", "clock or date"),
        ("x-anthropic-billing-header: cc_version=2.1.N; cch=aaN;", "billing_header", "accounting header"),
        ("Session 6f9619ff-8b86-d011-b42d-00c04fc964fN.", "random_id", "random identifier"),
    ] {
        ask(&format!("{} {rules}", stamp.replace('N', "1")), "go");
        let (header, habit) = ask(&format!("{} {rules}", stamp.replace('N', "2")), "go");
        assert!(
            header.contains("reason=diverged") && header.ends_with(&format!("habit={name}")),
            "{stamp}: {header}"
        );
        assert!(habit.expect("a habit").contains(words), "{stamp}");
    }
    let (header, habit) = ask(&format!("Write about cats. {rules}"), "go");
    assert!(!header.contains("habit=") && habit.is_none(), "{header}");
    // Reasoning is left out of answers only: here the questions differ.
    let alone = |user: &str| {
        let body =
            json!({"messages": [{"role": "user", "content": user}], "max_tokens": 100, "ignore_eos": true});
        let answer = server.post("/v1/chat/completions", &body);
        answer.header("x-infernix-cache").expect("a header").to_owned()
    };
    alone("count 0");
    let header = alone(&format!("What is Rust? {rules}"));
    assert!(header.contains("reason=diverged") && !header.contains("habit="), "{header}");
    // Shorter than a block, so nothing of it can be kept.
    let short = || {
        let body =
            json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": true});
        server.post("/v1/chat/completions", &body).header("x-infernix-cache").expect("a header").to_owned()
    };
    short();
    assert!(short().contains("reason=no_snapshot"));
}
