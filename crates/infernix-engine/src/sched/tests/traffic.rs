//! Agent traffic: conversations that grow, edits, shared heads, side requests, restarts.

use super::*;
use crate::cache::MissCause;

fn model(pages: usize) -> SimModel {
    SimModel::new(SimOptions { pages, sequences: 4, ..SimOptions::default() })
}

fn roomy(chunk: usize) -> EngineOptions {
    let mut o = options(chunk);
    (o.cache.device_bytes, o.cache.host_bytes) = (10_000_000, 10_000_000);
    o
}

fn ask(s: &mut Scheduler<SimModel>, r: Request) -> (usize, Vec<u32>, Option<Box<crate::cache::Miss>>) {
    let (sink, seen) = sink();
    s.submit(r, sink);
    run(s);
    let miss = seen.lock().unwrap().iter().find_map(|e| match e {
        Event::Admitted { miss, .. } => Some(miss.clone()),
        _ => None,
    });
    (cached(&seen), text(&seen), miss.flatten())
}

/// Turns of one conversation: head, then user and answer in turn; markers at the head's end and the generation opener.
fn turn(head: &[u32], history: &[u32], user: &[u32]) -> Request {
    let mut prompt = [head, history, user].concat();
    let opener = prompt.len();
    prompt.extend([1, 2, 3]);
    let mut r = request(prompt, 80);
    r.cache.markers = vec![head.len(), opener];
    r
}

#[test]
fn nine_tenths_of_later_turns_come_from_the_cache() {
    let mut s = Scheduler::new(model(2000), roomy(512)).unwrap();
    let head = ids(1, 3000);
    let mut history = Vec::new();
    for n in 0..12u64 {
        let user = ids(100 + n, 150);
        let r = turn(&head, &history, &user);
        // What a turn shares with the prompts and answers before it.
        let shared = head.len() + history.len();
        let (cached, answer, _) = ask(&mut s, r);
        if n > 0 {
            assert!(cached * 10 >= shared * 9, "turn {n}: {cached} of {shared}");
        }
        history = [&history[..], &user, &[1, 2, 3], &answer].concat();
    }
}

/// A call of 30 tokens, as agents make them all day: the next turn reads the last of them and what is new.
#[test]
fn a_short_answer_is_not_read_again_either() {
    let mut s = Scheduler::new(model(2000), roomy(512)).unwrap();
    let head = ids(1, 2000);
    let mut history = Vec::new();
    for n in 0..12u64 {
        let user = ids(100 + n, 40);
        let mut r = turn(&head, &history, &user);
        r.max_tokens = 30;
        let known = head.len() + history.len();
        let (cached, answer, _) = ask(&mut s, r);
        if n > 0 {
            assert_eq!(cached, known - 1, "turn {n}");
        }
        history = [&history[..], &user, &[1, 2, 3], &answer].concat();
    }
}

/// The system prompts of two agents part shortly before they end. Each end is kept all the same: all of an agent's conversations go on
/// from there.
#[test]
fn the_end_of_a_head_is_kept_however_soon_after_another_text_parted() {
    let mut s = Scheduler::new(model(2000), roomy(512)).unwrap();
    let common = ids(1, 500);
    let heads = [2, 3].map(|k| [&common[..], &ids(k, 50)].concat());
    ask(&mut s, turn(&heads[0], &[], &ids(100, 200)));
    assert_eq!(ask(&mut s, turn(&heads[1], &[], &ids(101, 200))).0, 0);
    assert_eq!(ask(&mut s, turn(&heads[1], &[], &ids(102, 200))).0, heads[1].len());
    assert_eq!(ask(&mut s, turn(&heads[0], &[], &ids(103, 200))).0, heads[0].len());
    // A third agent finds the place where the others parted.
    assert_eq!(ask(&mut s, turn(&[&common[..], &ids(4, 50)].concat(), &[], &ids(104, 200))).0, common.len());
}

#[test]
fn stripped_reasoning_costs_the_last_turn_only() {
    let mut s = Scheduler::new(model(2000), roomy(512)).unwrap();
    let head = ids(1, 2000);
    let mut history = Vec::new();
    for n in 0..6u64 {
        let user = ids(100 + n, 150);
        let (cached, answer, _) = ask(&mut s, turn(&head, &history, &user));
        if n > 0 {
            // All but the last answer without its reasoning.
            let known = head.len() + history.len() - 40 - 3;
            assert!(cached + 150 + 64 >= known, "turn {n}: {cached} of {known}");
        }
        history = [&history[..], &user, &[1, 2, 3], &answer[40..]].concat();
    }
}

#[test]
fn an_edit_in_the_middle_reads_again_from_the_last_snapshot_before_it() {
    let mut s = Scheduler::new(model(2000), roomy(512)).unwrap();
    let (head, a, b) = (ids(1, 2000), ids(2, 300), ids(3, 300));
    let (_, answer, _) = ask(&mut s, turn(&head, &[], &a));
    let history = [&a[..], &[1, 2, 3], &answer].concat();
    ask(&mut s, turn(&head, &history, &b));
    let mut edited = a.clone();
    edited[200] += 1;
    let (cached, _, miss) = ask(&mut s, turn(&head, &[], &edited));
    assert_eq!(cached, head.len(), "the snapshot at the head's end is the last before the edit");
    let miss = miss.unwrap();
    assert_eq!((miss.shared, miss.cause), (head.len() + 200, MissCause::Diverged));
    assert_eq!(miss.cached.ids[miss.cached.before], a[200]);
    assert_eq!(miss.prompt.ids[miss.prompt.before], edited[200]);
    // The point of divergence has a snapshot now: a second branch pays for its own part only.
    edited[200] += 1;
    let (cached, ..) = ask(&mut s, turn(&head, &[], &edited));
    assert_eq!(cached, head.len() + 200);
}

#[test]
fn a_shared_head_is_paid_for_once_also_by_requests_that_run_together() {
    let mut s = Scheduler::new(model(2000), roomy(256)).unwrap();
    let head = ids(1, 2000);
    let (a, b) = (sink(), sink());
    for (k, sink) in [(7, a.0), (8, b.0)] {
        // No markers: the engine itself must see what they share.
        s.submit(request([&head[..], &ids(k, 500)].concat(), 10), sink);
    }
    run(&mut s);
    assert_eq!((cached(&a.1), cached(&b.1)), (0, head.len()));
    assert_eq!(s.counters.prefill_tokens, 2000 + 2 * 500);
}

#[test]
fn a_side_request_of_fifty_tokens_evicts_nothing() {
    let head = ids(1, 2000);
    // The budget of snapshots is full to the last byte, on the device or in RAM; then the pages are, which go to RAM while they
    // are lent.
    for (pages, device, host) in [(60, 60_000, 0), (60, 0, 63_000), (43, 60_000, 10_000_000)] {
        let next_turn = |side: bool| {
            let mut o = roomy(512);
            (o.cache.device_bytes, o.cache.host_bytes) = (device, host);
            let mut s = Scheduler::new(model(pages), o).unwrap();
            let (_, answer, _) = ask(&mut s, turn(&head, &[], &ids(2, 500)));
            let held = s.status(true).cache;
            let snapshots = held.device.snapshots + held.host.snapshots;
            assert_eq!((snapshots, s.counters.evicted_snapshots), (3, 0), "{held:?}");
            if side {
                ask(&mut s, request(ids(9, 50), 20));
                // Its own snapshot is worth least, so it goes itself.
                assert!(s.counters.evicted_snapshots <= 1, "{:?}", s.counters);
            }
            let history = [&ids(2, 500)[..], &[1, 2, 3], &answer].concat();
            let shared = head.len() + history.len();
            let (cached, ..) = ask(&mut s, turn(&head, &history, &ids(3, 100)));
            assert!(cached * 10 >= shared * 9, "{cached} of {shared}");
            cached
        };
        assert_eq!(next_turn(true), next_turn(false), "{pages} pages");
    }
}

#[test]
fn the_cache_file_makes_the_first_turn_after_a_restart_a_hit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache");
    let mut o = roomy(512);
    o.cache.file = Some(file.clone());
    o.cache.identity = "model 1".into();
    let head = ids(1, 2000);
    let mut s = Scheduler::new(model(200), o.clone()).unwrap();
    let (_, answer, _) = ask(&mut s, turn(&head, &[], &ids(2, 333)));
    s.stop("test");
    assert!(s.save_cache().unwrap() > 0);
    let history = [&ids(2, 333)[..], &[1, 2, 3], &answer].concat();
    let shared = head.len() + history.len();
    let again = |o: &EngineOptions| {
        let mut s = Scheduler::new(model(200), o.clone()).unwrap();
        let loaded = s.load_cache();
        let (cached, ..) = ask(&mut s, turn(&head, &history, &ids(3, 100)));
        assert_eq!(s.check_idle(), Ok(()));
        (loaded, cached)
    };
    let (loaded, cached) = again(&o);
    assert!(loaded.unwrap() > 0);
    assert!(cached * 10 >= shared * 9, "{cached} of {shared}");
    // Another model, and every kind of damage, is refused and harmless.
    let mut other = o.clone();
    other.cache.identity = "model 2".into();
    assert!(again(&other).0.unwrap_err().contains("another model"));
    let good = std::fs::read(&file).unwrap();
    for at in [0, 9, 40, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&file, bad).unwrap();
        let (loaded, cached) = again(&o);
        assert!(loaded.unwrap_err().contains("damaged"), "byte {at}");
        assert_eq!(cached, 0);
    }
    std::fs::write(&file, &good[..good.len() / 3]).unwrap();
    assert!(again(&o).0.is_err());
    std::fs::write(&file, b"").unwrap();
    assert!(again(&o).0.is_err());
    // A RAM tier smaller than the file takes what fits.
    std::fs::write(&file, &good).unwrap();
    o.cache.host_bytes = 70_000;
    assert!(again(&o).0.is_ok());
}

#[test]
fn salts_share_nothing_and_a_second_read_is_cheap() {
    let mut s = Scheduler::new(model(400), roomy(512)).unwrap();
    let salted = |salt: &str| {
        let mut r = request(ids(1, 700), 5);
        r.cache.salt = salt.into();
        r
    };
    let (cached, a, miss) = ask(&mut s, salted("a"));
    assert_eq!((cached, miss.unwrap().cause), (0, MissCause::Cold));
    assert_eq!(ask(&mut s, salted("b")).0, 0);
    let (cached, again, miss) = ask(&mut s, salted("a"));
    assert_eq!((cached, again, miss), (699, a, None));
}

#[test]
fn what_memory_pressure_took_is_called_evicted() {
    let mut o = roomy(512);
    o.cache.host_bytes = 0;
    let mut s = Scheduler::new(model(40), o).unwrap();
    ask(&mut s, request(ids(1, 1500), 5));
    ask(&mut s, request(ids(2, 2200), 5));
    let (cached, _, miss) = ask(&mut s, request(ids(1, 1500), 5));
    assert_eq!((cached, miss.unwrap().cause), (0, MissCause::Evicted));
}

/// Blocks past the last snapshot are the first to go. That nothing resumes there is not for want of room.
#[test]
fn what_never_had_a_state_is_not_called_evicted() {
    let mut s = Scheduler::new(model(40), roomy(512)).unwrap();
    let first = ids(1, 1530);
    // Too short for a snapshot at its end, but it completes a block.
    let (_, answer, _) = ask(&mut s, request(first.clone(), 12));
    ask(&mut s, request(ids(2, 2200), 5));
    assert!(s.counters.evicted_blocks > 0);
    let (cached, _, miss) = ask(&mut s, request([&first[..], &answer, &ids(3, 100)].concat(), 5));
    assert_eq!((cached, miss.unwrap().cause), (first.len() - 1, MissCause::NoSnapshot));
    s.clear_cache();
    let (cached, _, miss) = ask(&mut s, request(first, 5));
    assert_eq!((cached, miss.unwrap().cause), (0, MissCause::Cold));
}

#[test]
fn a_prompt_asked_again_is_never_called_new() {
    let mut s = Scheduler::new(model(400), roomy(512)).unwrap();
    ask(&mut s, request(ids(1, 700), 5));
    // Too short for a snapshot, alone and like another text; and one whose end is too near to where it parts from another.
    let branch = |same: usize, own: usize| [&ids(1, same)[..], &ids(9, own)].concat();
    for (prompt, shared, reused) in [(ids(2, 40), 0, 0), (branch(30, 10), 30, 0), (branch(300, 20), 300, 300)]
    {
        let first = ask(&mut s, request(prompt.clone(), 1)).2.unwrap();
        let cause = if shared == 0 { MissCause::Cold } else { MissCause::Diverged };
        assert_eq!((first.shared, first.cause), (shared, cause));
        let again = ask(&mut s, request(prompt.clone(), 1)).2.unwrap();
        assert_eq!((again.shared, again.reused, again.cause), (prompt.len(), reused, MissCause::NoSnapshot));
        let shown = prompt.len().min(32);
        assert_eq!((again.cached.before, again.cached.ids.len()), (shown, shown));
    }
}
