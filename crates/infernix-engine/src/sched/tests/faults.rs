//! Failures: of a call, of a sink, of the whole backend.

use super::*;
use crate::sim::Fault;

fn failing(after: usize, fault: Fault) -> Scheduler<SimModel> {
    let mut model =
        SimModel::new(SimOptions { draft_accuracy: Some(0.5), sequences: 3, ..SimOptions::default() });
    (model.fail_after, model.fault) = (Some(after), fault);
    Scheduler::new(model, options(64)).unwrap()
}

#[test]
fn a_failed_or_panicking_call_fails_its_requests_and_the_next_one_works() {
    for fault in [Fault::Error, Fault::Panic] {
        for after in 0..14 {
            let mut s = failing(after, fault);
            let (a, b) = (sink(), sink());
            s.submit(request(ids(1, 200), 20), a.0);
            run(&mut s);
            let failed = matches!(end(&a.1), Event::Failed(RequestError::Engine(e)) if e.contains("planted"));
            assert!(failed || matches!(end(&a.1), Event::Finished { .. }), "{fault:?} after {after}");
            s.submit(request(ids(1, 200), 20), b.0);
            run(&mut s);
            assert_eq!(text(&b.1).len(), 20, "{fault:?} after {after}");
            assert_eq!((s.check_idle(), &s.stopped), (Ok(()), &None));
        }
    }
}

#[test]
fn a_prompt_that_fails_leaves_the_lanes_beside_it_alone() {
    let mut s = failing(usize::MAX, Fault::Error);
    let (a, b) = (sink(), sink());
    s.submit(request(ids(1, 100), 200), a.0);
    for _ in 0..6 {
        s.step();
    }
    assert!(!text(&a.1).is_empty(), "the first request decodes");
    // The next call is the second request's first chunk.
    s.submit(request(ids(2, 300), 20), b.0);
    s.runner.fail_after = Some(0);
    run(&mut s);
    assert!(matches!(end(&b.1), Event::Failed(RequestError::Engine(_))));
    assert_eq!(text(&a.1), SimModel::new(SimOptions::default()).greedy(&ids(1, 100), 200));
}

#[test]
fn a_poisoned_backend_stops_the_engine_and_says_so() {
    let make = || {
        let mut model = SimModel::new(SimOptions::default());
        (model.fail_after, model.fault) = (Some(3), Fault::Poison);
        Ok(model)
    };
    let engine = Engine::start(options(64), make).unwrap();
    let (a, b) = (sink(), sink());
    engine.submit(request(ids(1, 200), 50), a.0).unwrap();
    engine.submit(request(ids(2, 200), 50), b.0).unwrap();
    let why = loop {
        if let Some(why) = engine.status().stopped {
            break why;
        }
        std::thread::yield_now();
    };
    assert!(why.contains("planted poison"), "{why}");
    assert!(matches!(end(&a.1), Event::Failed(_)) && matches!(end(&b.1), Event::Failed(_)));
    let late = engine.submit(request(ids(3, 10), 5), sink().0);
    assert!(matches!(late, Err(SubmitError::Stopped(why)) if why.contains("planted poison")));
    assert_eq!(engine.stop_problem(), Some(why));
}

#[test]
fn what_goes_wrong_while_stopping_is_told_apart_from_why_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let stopped = |file: std::path::PathBuf| {
        let mut o = options(64);
        o.cache.file = Some(file);
        let engine = Engine::start(o, || Ok(SimModel::new(SimOptions::default()))).unwrap();
        let (sink, seen) = sink();
        engine.submit(request(ids(1, 300), 5), sink).unwrap();
        engine.shutdown(Drain::Within(std::time::Duration::from_secs(60)));
        assert!(matches!(end(&seen), Event::Finished { .. }));
        assert_eq!(engine.status().stopped.as_deref(), Some(crate::sched::SHUT_DOWN));
        engine.stop_problem()
    };
    assert_eq!(stopped(folder.path().join("cache")), None);
    let problem = stopped(folder.path().join("missing/cache")).unwrap();
    assert!(problem.contains("missing"), "{problem}");
}

#[test]
fn a_backend_that_fails_every_time_stops_the_engine() {
    let mut s = failing(0, Fault::Lasting);
    let seen: Vec<Seen> = (0..20)
        .map(|n| {
            let (sink, seen) = sink();
            s.submit(request(ids(n, 30), 5), sink);
            seen
        })
        .collect();
    while s.stopped.is_none() {
        assert!(s.open() > 0, "it fails every request and goes on");
        s.step();
    }
    assert!(s.counters.failed <= 8, "{}", s.counters.failed);
    s.stop("test");
    seen.iter().for_each(|seen| assert!(matches!(end(seen), Event::Failed(_))));
}

#[test]
fn a_sink_that_panics_loses_its_request_and_no_other() {
    let mut s = failing(usize::MAX, Fault::Error);
    s.submit(request(ids(1, 100), 50), Box::new(|_| panic!("nobody is there")));
    let (sink, seen) = sink();
    s.submit(request(ids(2, 100), 50), sink);
    run(&mut s);
    assert_eq!(text(&seen).len(), 50);
    assert_eq!(s.counters.cancelled, 1);
    assert_eq!(s.check_idle(), Ok(()));
}
