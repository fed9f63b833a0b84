//! Connections: accepting them, bounding them, and ending them when the server stops.

use crate::app::App;
use crate::http::router;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use infernix_engine::sched::Drain;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// Bytes of a request head; longer ones are refused with 431.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Silence after which the system probes a connection, and how long unanswered data may wait: dead peers are found
/// within about 20 s even while nothing is sent.
const TCP_IDLE: Duration = Duration::from_secs(10);
const TCP_USER_TIMEOUT_MS: u32 = 15_000;
/// Time that streams get to say that the engine stopped.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `stop` ends, then lets running requests finish (`--drain-timeout-ms`), stops the engine, which saves
/// its cache, and returns.
///
/// # Errors
/// None after the start: a connection that cannot be accepted costs that connection.
pub async fn serve(app: Arc<App>, listener: TcpListener, stop: impl Future<Output = ()>) -> io::Result<()> {
    let router = router(&app);
    let places = Arc::new(Semaphore::new(app.options.max_connections.max(1)));
    let (stopping, stopped) = watch::channel(false);
    tokio::pin!(stop);
    loop {
        let place = tokio::select! {
            place = Arc::clone(&places).acquire_owned() => place,
            () = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let (Ok(place), Ok((stream, _))) = (place, accepted) else {
            // Out of file descriptors, most likely: connections must end before new ones can begin.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let connection = connection(Arc::clone(&app), stream, router.clone(), stopped.clone());
        tokio::spawn(async move {
            connection.await;
            drop(place);
        });
    }
    drop(listener);
    app.drain();
    let _ = stopping.send(true);
    drop(stopped);
    let deadline = Instant::now() + app.options.drain_timeout;
    while app.active_requests() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let engine = Arc::clone(&app.engine);
    // A panic of the engine while it stops changes nothing about stopping.
    let _ = tokio::task::spawn_blocking(move || engine.shutdown(Drain::Now)).await;
    let deadline = Instant::now() + LAST_WORDS;
    while app.active_requests() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    app.log.write("server_stop", serde_json::Map::new());
    Ok(())
}

/// Serves one connection to its end.
async fn connection(app: Arc<App>, stream: TcpStream, router: Router, mut stopped: watch::Receiver<bool>) {
    tune(&stream);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(app.options.header_timeout)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(served);
    tokio::select! {
        // Errors of a connection are its client's.
        _ = served.as_mut() => return,
        _ = stopped.wait_for(|s| *s) => served.as_mut().graceful_shutdown(),
    }
    let _ = served.await;
}

/// Small writes leave at once, and peers that have gone are noticed. All of it is best effort.
fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    {
        use rustix::net::sockopt;
        let _ = sockopt::set_socket_keepalive(stream, true);
        let _ = sockopt::set_tcp_keepidle(stream, TCP_IDLE);
        let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5));
        let _ = sockopt::set_tcp_keepcnt(stream, 2);
        let _ = sockopt::set_tcp_user_timeout(stream, TCP_USER_TIMEOUT_MS);
    }
}
