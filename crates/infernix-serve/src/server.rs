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
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;
/// Silence after which the system probes a connection, and how long unanswered data may wait: dead peers are found
/// within about 20 s even while nothing is sent.
const TCP_IDLE: Duration = Duration::from_secs(10);
const TCP_USER_TIMEOUT_MS: u32 = 15_000;
/// Connections of the address for those who run the server.
const MAX_ADMIN: usize = 16;
/// Time that streams get to say that the engine stopped.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `stop` ends, then lets running requests finish (`--drain-timeout-ms`), stops the engine, which saves
/// its cache, and returns. `admin` is an address for those who run the server, with its routes; it answers to the end.
///
/// # Errors
/// None after the start: a connection that cannot be accepted costs that connection.
pub async fn serve(
    app: Arc<App>,
    listener: TcpListener,
    admin: Option<(TcpListener, Router)>,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let (stopping, stopped) = watch::channel(false);
    let (closing, closed) = watch::channel(false);
    let admin = admin.map(|(listener, router)| {
        let app = Arc::clone(&app);
        tokio::spawn(async move { accept(&app, &listener, &router, MAX_ADMIN, &closed).await })
    });
    let watched = tokio::spawn(report(Arc::clone(&app)));
    let router = router(&app);
    tokio::select! {
        () = accept(&app, &listener, &router, app.options.max_connections, &stopped) => {}
        () = stop => {}
    }
    drop(listener);
    app.stop();
    let _ = stopping.send(true);
    let deadline = Instant::now() + app.options.drain_timeout;
    while app.active_requests() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let cut = app.active_requests();
    if cut > 0 {
        tracing::warn!(requests = cut, "the time to finish is over (--drain-timeout-ms)");
    }
    let engine = Arc::clone(&app.engine);
    // A panic of the engine while it stops changes nothing about stopping.
    let _ = tokio::task::spawn_blocking(move || engine.shutdown(Drain::Now)).await;
    let deadline = Instant::now() + LAST_WORDS;
    while app.active_requests() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    watched.abort();
    let _ = closing.send(true);
    if let Some(admin) = admin {
        admin.abort();
    }
    app.log.write("server_stop", serde_json::Map::new());
    Ok(())
}

/// Accepts connections, at most `most` at once; further ones wait.
async fn accept(
    app: &Arc<App>,
    listener: &TcpListener,
    router: &Router,
    most: usize,
    stopped: &watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
    let mut failing = false;
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let (place, stream) = match (place, listener.accept().await) {
            (Ok(place), Ok((stream, _))) => (place, stream),
            (_, refused) => {
                // Out of file descriptors, most likely: connections must end before new ones can begin.
                if !std::mem::replace(&mut failing, true)
                    && let Err(error) = refused
                {
                    tracing::warn!("connections cannot be accepted: {error}");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        failing = false;
        let connection = connection(Arc::clone(app), stream, router.clone(), stopped.clone());
        tokio::spawn(async move {
            connection.await;
            drop(place);
        });
    }
}

/// Says now and then what the server does, and once that the engine has stopped.
async fn report(app: Arc<App>) {
    let Some(every) = app.options.stats_interval else { return };
    let mut last = app.engine.status().counters;
    let mut said = false;
    loop {
        tokio::time::sleep(every).await;
        let status = app.engine.status();
        if let (Some(why), false) = (&status.stopped, said) {
            said = true;
            if !app.draining() {
                tracing::error!("the engine has stopped and nothing more is answered: {why}");
            }
        }
        let now = status.counters;
        if !status.lanes.is_empty() || now != last {
            let seconds = every.as_secs_f64();
            let rate =
                |now: u64, last: u64| (now.saturating_sub(last) as f64 / seconds * 10.0).round() / 10.0;
            tracing::info!(
                running = status.lanes.len(),
                waiting = status.queued + status.paused,
                prefill_per_second = rate(now.prefill_tokens, last.prefill_tokens),
                decode_per_second = rate(now.output_tokens, last.output_tokens),
                cached_tokens = now.cached_tokens - last.cached_tokens,
                drafted = now.drafted - last.drafted,
                accepted = now.accepted - last.accepted,
                "engine"
            );
        }
        last = now;
    }
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
        ended = served.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!("a connection ended: {error}");
            }
            return;
        }
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
