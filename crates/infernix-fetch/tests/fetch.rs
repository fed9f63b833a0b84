//! Fetching from a server that behaves, and from one that drops, stalls, truncates and lies.

use infernix_fetch::{FetchError, FetchOptions, Fetched, Progress, fetch};
use sha2::Digest as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// Closes after a third of what is left, each time.
    Drop,
    /// Falls silent after the first bytes, once.
    Stall,
    /// 503 twice.
    Busy,
    /// Answers a range request with the whole file.
    NoRange,
    /// States a wrong range.
    WrongRange,
    /// States a length other than the listing's.
    WrongLength,
    /// Sends other bytes of the right length.
    WrongBytes,
    /// Redirects to another origin.
    Redirect,
    /// Lists a name that leaves the folder.
    Escape,
}

struct Server {
    url: String,
    log: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
    }
}

fn big() -> Vec<u8> {
    (0..300_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn serve(fault: Fault, elsewhere: Option<String>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let (kept, stopped) = (Arc::clone(&log), Arc::clone(&stop));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            let (kept, served, elsewhere) = (Arc::clone(&kept), Arc::clone(&served), elsewhere.clone());
            std::thread::spawn(move || drop(answer(stream, fault, elsewhere, &kept, &served)));
        }
    });
    Server { url, log, stop }
}

fn answer(
    mut s: TcpStream,
    fault: Fault,
    elsewhere: Option<String>,
    log: &Mutex<Vec<String>>,
    served: &AtomicUsize,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(s.try_clone()?);
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    log.lock().unwrap().push(head.clone());
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let close = "connection: close\r\n\r\n";
    let data = big();
    if path.starts_with("/api/models/org/model/revision/main") {
        let name = if fault == Fault::Escape { "../../evil" } else { "sub/model.safetensors" };
        let body = format!(
            "{{\"sha\":\"{}\",\"siblings\":[{{\"rfilename\":\"config.json\",\"size\":3,\"blobId\":\"{}\"}},\
             {{\"rfilename\":\"{name}\",\"size\":1,\"lfs\":{{\"size\":{},\"sha256\":\"{}\"}}}}]}}",
            "a".repeat(40),
            // git hash-object of "{}\n".
            "0967ef424bce6791893e9a57bb952f80fd536e93",
            data.len(),
            hex(&sha2::Sha256::digest(&data))
        );
        return write!(s, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n{close}{body}", body.len());
    }
    if path.ends_with("/config.json") {
        return write!(s, "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n{close}{{}}\n");
    }
    if !path.ends_with("/model.safetensors") {
        return write!(s, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n{close}");
    }
    if let (Fault::Redirect, Some(to)) = (fault, elsewhere) {
        return write!(s, "HTTP/1.1 302 Found\r\nlocation: {to}{path}\r\ncontent-length: 0\r\n{close}");
    }
    let n = served.fetch_add(1, Ordering::Relaxed);
    if fault == Fault::Busy && n < 2 {
        return write!(s, "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n{close}");
    }
    let range = head.to_lowercase().lines().find_map(|l| l.strip_prefix("range: bytes=").map(str::to_owned));
    let from: usize = range.and_then(|r| r.trim_end_matches('-').parse().ok()).unwrap_or(0);
    let from = if fault == Fault::NoRange { 0 } else { from };
    let stated = match fault {
        Fault::WrongLength => data.len() - 7,
        _ => data.len() - from,
    };
    if from > 0 {
        let shown = if fault == Fault::WrongRange { from - 1 } else { from };
        write!(
            s,
            "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes {shown}-{}/{}\r\ncontent-length: {stated}\r\n{close}",
            data.len() - 1,
            data.len()
        )?;
    } else {
        write!(s, "HTTP/1.1 200 OK\r\ncontent-length: {stated}\r\n{close}")?;
    }
    let left = &data[from..];
    match fault {
        Fault::Drop | Fault::NoRange | Fault::WrongRange if n < 3 => {
            s.write_all(&left[..left.len() / 3])?;
            s.flush()
        }
        Fault::Stall if n == 0 => {
            s.write_all(&left[..100_000])?;
            s.flush()?;
            std::thread::sleep(Duration::from_secs(4));
            Ok(())
        }
        Fault::WrongBytes => s.write_all(&vec![7; left.len()]),
        Fault::WrongLength => s.write_all(&left[..stated]),
        _ => s.write_all(left),
    }
}

fn options(server: &Server, hub: &Path) -> FetchOptions {
    FetchOptions {
        repo: "org/model".into(),
        revision: "main".into(),
        include: Vec::new(),
        exclude: Vec::new(),
        endpoint: server.url.clone(),
        token: Some("secret".into()),
        hub: hub.to_owned(),
        parallel: 2,
        allow_http: false,
        stall: Duration::from_millis(800),
        attempts: 4,
    }
}

fn run(o: &FetchOptions) -> Result<Fetched, FetchError> {
    fetch(o, &Progress::default(), &AtomicBool::new(false))
}

fn whole(f: &Fetched) {
    assert_eq!(std::fs::read(f.folder.join("sub/model.safetensors")).unwrap(), big());
    assert_eq!(std::fs::read(f.folder.join("config.json")).unwrap(), b"{}\n");
}

#[test]
fn a_repository_lands_in_the_standard_cache_layout() {
    let (server, hub) = (serve(Fault::None, None), tempfile::tempdir().unwrap());
    let f = run(&options(&server, hub.path())).unwrap();
    whole(&f);
    assert_eq!((f.files, f.kept, f.received), (2, 0, 1_200_003));
    let root = hub.path().join("models--org--model");
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), "a".repeat(40));
    assert_eq!(f.folder, root.join("snapshots").join("a".repeat(40)));
    assert!(std::fs::read_link(f.folder.join("config.json")).unwrap().starts_with("../../blobs"));
    // Nothing is fetched twice.
    let again = run(&options(&server, hub.path())).unwrap();
    assert_eq!((again.kept, again.received), (1_200_003, 0));
}

#[test]
fn connections_that_drop_stall_or_are_refused_for_a_while_are_resumed() {
    for fault in [Fault::Drop, Fault::Stall, Fault::Busy, Fault::NoRange] {
        let (server, hub) = (serve(fault, None), tempfile::tempdir().unwrap());
        let f = run(&options(&server, hub.path())).unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        whole(&f);
        assert!(f.resumed > 0, "{fault:?}");
        if fault == Fault::Drop {
            assert_eq!(f.received, 1_200_003, "no byte twice");
        }
    }
}

#[test]
fn an_interrupted_fetch_goes_on_where_it_was() {
    let hub = tempfile::tempdir().unwrap();
    let server = serve(Fault::Drop, None);
    let once = FetchOptions { attempts: 1, ..options(&server, hub.path()) };
    assert!(matches!(run(&once), Err(FetchError::Network { .. })));
    let f = run(&options(&server, hub.path())).unwrap();
    whole(&f);
    assert!(f.kept >= 400_000 && f.kept + f.received == 1_200_003, "{f:?}");
}

#[test]
fn lies_are_errors_that_leave_nothing_behind() {
    for fault in [Fault::WrongRange, Fault::WrongLength, Fault::WrongBytes, Fault::Escape] {
        let (server, hub) = (serve(fault, None), tempfile::tempdir().unwrap());
        let e = run(&options(&server, hub.path())).expect_err("a lie");
        assert!(matches!(e, FetchError::Answer { .. } | FetchError::Digest { .. }), "{fault:?}: {e}");
        let link = hub
            .path()
            .join("models--org--model/snapshots")
            .join("a".repeat(40))
            .join("sub/model.safetensors");
        assert!(!link.exists(), "{fault:?}");
        assert!(!hub.path().parent().unwrap().join("evil").exists());
    }
}

#[test]
fn the_token_never_crosses_to_another_origin() {
    let other = serve(Fault::None, None);
    let (server, hub) = (serve(Fault::Redirect, Some(other.url.clone())), tempfile::tempdir().unwrap());
    whole(&run(&options(&server, hub.path())).unwrap());
    let heads = |s: &Server| s.log.lock().unwrap().join("\n").to_lowercase();
    assert!(heads(&server).contains("authorization: bearer secret"));
    assert!(heads(&other).contains("get /org/model/resolve/") && !heads(&other).contains("secret"));
}

#[test]
fn patterns_choose_files_and_a_pattern_without_a_match_is_an_error() {
    let (server, hub) = (serve(Fault::None, None), tempfile::tempdir().unwrap());
    let o = FetchOptions { include: vec!["*.json".into()], ..options(&server, hub.path()) };
    let f = run(&o).unwrap();
    assert_eq!(f.files, 1);
    assert!(!f.folder.join("sub").exists());
    let none = FetchOptions { include: vec!["*.gguf".into()], ..options(&server, hub.path()) };
    assert!(run(&none).unwrap_err().to_string().contains("config.json"));
    let gone = FetchOptions { revision: "v2".into(), ..options(&server, hub.path()) };
    assert!(matches!(run(&gone), Err(FetchError::Status { status: 404, .. })));
}
