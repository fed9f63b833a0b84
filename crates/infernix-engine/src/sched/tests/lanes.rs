//! Many requests over few lanes and little memory: leaks, order, starvation; and time.

use super::*;

/// What became of one of the requests.
struct Fate {
    id: RequestId,
    seen: Seen,
}

#[test]
fn a_thousand_requests_with_cancels_and_little_memory_leak_nothing_keep_their_order_and_all_end() {
    let sim = SimOptions { pages: 40, sequences: 8, draft_accuracy: Some(0.7), ..SimOptions::default() };
    let mut s = Scheduler::new(SimModel::new(sim), options(64)).unwrap();
    let (mut all, mut longest) = (Vec::new(), 0);
    let admitted = Arc::new(Mutex::new(Vec::new()));
    for n in 0..1000u64 {
        let dice = crate::numerics::round::mix(n);
        let (len, most) = (1 + (dice % 400) as usize, (dice >> 20) as usize % 120);
        longest = longest.max(len + most);
        let (mut sink, seen) = sink();
        let order = Arc::clone(&admitted);
        let ordered: Sink = Box::new(move |e| {
            if matches!(e, Event::Admitted { .. }) {
                order.lock().unwrap().push(n);
            }
            sink(e);
        });
        let id = s.submit(request(ids(n % 50, len), most), ordered);
        all.push(Fate { id, seen });
    }
    // The oldest request with a lane is never paused for a younger one, so it ends within as many steps as it has chunks and
    // tokens; in between older prompts may take a step each.
    let (mut steps, mut oldest, mut since) = (0u64, None, 0);
    while s.open() > 0 {
        s.step();
        steps += 1;
        if steps % 40 == 0 {
            s.cancel(all[(crate::numerics::round::mix(steps) % 1000) as usize].id);
        }
        let head = s.jobs.first().map(|j| j.id);
        (oldest, since) = if head == oldest { (oldest, since + 1) } else { (head, 0) };
        assert!(since < 2 * longest, "request {oldest:?} is the oldest for {since} steps and does not end");
    }
    assert_eq!(s.check_idle(), Ok(()));
    assert!(s.counters.preemptions > 0, "the memory budget forced nothing");
    assert!(s.counters.cancelled > 0 && s.counters.failed == 0, "{:?}", s.counters);
    all.iter().for_each(|f| drop(end(&f.seen)));
    assert!(admitted.lock().unwrap().is_sorted(), "requests overtook each other");
    let (model, checked) = s.into_runner();
    checked.unwrap();
    assert_eq!(model.free_slots(), 8);
}

#[test]
fn paused_requests_resume_in_order_and_before_the_queue() {
    let sim = SimOptions { pages: 12, sequences: 4, ..SimOptions::default() };
    let mut o = options(64);
    (o.cache.device_bytes, o.cache.host_bytes) = (0, 0);
    let mut s = Scheduler::new(SimModel::new(sim), o).unwrap();
    let seen: Vec<Seen> = (0..6u64)
        .map(|n| {
            let (sink, seen) = sink();
            s.submit(request(ids(n, 150), 300), sink);
            seen
        })
        .collect();
    let mut ended = Vec::new();
    while s.open() > 0 {
        // Whoever is paused is younger than whoever runs.
        s.step();
        let stages: Vec<bool> = s.jobs.iter().map(|j| j.lane.is_some()).collect();
        assert!(stages.is_sorted_by(|a, b| a >= b), "a younger request runs while an older one is paused");
        for (n, seen) in seen.iter().enumerate() {
            let done = seen.lock().unwrap().iter().any(|e| matches!(e, Event::Finished { .. }));
            if done && !ended.contains(&n) {
                ended.push(n);
            }
        }
    }
    assert!(s.counters.preemptions > 0);
    assert!(s.counters.replayed_tokens > 0, "nothing was kept, so texts are read again");
    assert!(ended.is_sorted(), "equal requests end in the order they came: {ended:?}");
    assert_eq!(s.check_idle(), Ok(()));
}

/// Seconds that answers of `tokens` tokens take one after the other.
fn seconds(costs: crate::sim::Costs, spec: SpecOptions, accuracy: f64, answers: u64, tokens: usize) -> f64 {
    let sim = SimOptions { draft_accuracy: Some(accuracy), costs, ..SimOptions::default() };
    let mut o = options(512);
    o.spec = spec;
    let mut s = Scheduler::new(SimModel::new(sim), o).unwrap();
    for n in 0..answers {
        s.submit(request(ids(n, 40), tokens), sink().0);
        run(&mut s);
    }
    s.now().as_secs_f64()
}

#[test]
fn short_answers_are_no_slower_with_automatic_drafts_where_none_pay() {
    // As on a small model on a CPU: a column costs as much as a round, and guesses are poor.
    let costs = crate::sim::Costs { round: 0.1e-3, column: 2e-3, step: 1e-3, ..Default::default() };
    let off = SpecOptions { mode: SpecMode::Off, ..SpecOptions::default() };
    for (answers, tokens) in [(1, 40), (10, 20), (40, 12), (5, 400)] {
        let plain = seconds(costs, off, 0.4, answers, tokens);
        let auto = seconds(costs, SpecOptions::default(), 0.4, answers, tokens);
        assert!(
            auto <= 1.05 * plain + 6.0 * 3e-3,
            "{answers} answers of {tokens}: {auto} s, plain {plain} s"
        );
    }
}

#[test]
fn answers_are_faster_with_automatic_drafts_where_they_pay() {
    let costs = crate::sim::Costs { round: 10e-3, column: 1e-3, step: 1e-3, ..Default::default() };
    let off = SpecOptions { mode: SpecMode::Off, ..SpecOptions::default() };
    let plain = seconds(costs, off, 0.8, 10, 60);
    let auto = seconds(costs, SpecOptions::default(), 0.8, 10, 60);
    assert!(auto < 0.6 * plain, "{auto} s, plain {plain} s");
}

#[test]
fn what_joins_a_request_that_runs_is_neither_refused_nor_given_up() {
    let mut o = options(64);
    (o.max_concurrency, o.max_pending_requests, o.pending_timeout) = (1, 0, Duration::from_millis(1));
    let joins = |seed| Request { joins: true, ..request(ids(seed, 100), 5) };
    let mut s = Scheduler::new(SimModel::new(SimOptions::default()), o.clone()).unwrap();
    let (first, second, stranger) = (sink(), sink(), sink());
    s.submit(request(ids(1, 100), 40), first.0);
    s.submit(joins(2), second.0);
    s.submit(request(ids(3, 100), 5), stranger.0);
    run(&mut s);
    assert!(matches!(end(&second.1), Event::Finished { .. }));
    assert!(matches!(end(&stranger.1), Event::Failed(RequestError::QueueTimeout(_))));

    let engine = Engine::start(o, || Ok(SimModel::new(SimOptions::default()))).unwrap();
    // The engine stands still in the first request's event, so the only lane is taken.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    engine.submit(request(ids(1, 100), 40), Box::new(move |_| _ = wait.recv())).unwrap();
    let full = engine.submit(request(ids(3, 100), 5), sink().0);
    assert!(matches!(full, Err(SubmitError::QueueFull { .. })));
    let second = sink();
    engine.submit(joins(2), second.0).unwrap();
    drop(go);
    engine.shutdown(Drain::Within(Duration::from_secs(60)));
    assert!(matches!(end(&second.1), Event::Finished { .. }));
}

#[test]
fn an_engine_that_has_just_started_knows_how_it_drafts() {
    let make = |accuracy| {
        move || Ok(SimModel::new(SimOptions { draft_accuracy: accuracy, ..SimOptions::default() }))
    };
    let speculation = |accuracy| Engine::start(options(64), make(accuracy)).unwrap().status().speculation;
    assert_eq!(speculation(Some(0.5)), "mtp auto, copies auto");
    assert_eq!(speculation(None), "no drafter, copies auto");
}
