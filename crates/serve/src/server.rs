//! The server: its threads, connections, limits, start and end.

use crate::adapters::Adapters;
use crate::app::{App, Shared, now};
use crate::error::ApiError;
use crate::jobs::Jobs;
use crate::keys::Gate;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::replicas::Replicas;
use crate::store::Store;
use crate::{api, descriptors, keys, tls, web};
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use metal_candle::generate::{GenerateOptions, Grammars};
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::{Error, Result};
use serde_json::{Map, Value};
use std::any::Any;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::CorsLayer;
use tower_http::timeout::RequestBodyTimeoutLayer;

/// How long the head of a request may take, and each piece of its body.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is served.
pub struct Base {
    /// The frozen model.
    pub model: Arc<Model>,
    /// The same model on other devices, each of which writes texts, too.
    pub replicas: Vec<Arc<Model>>,
    /// Its tokenizer, with the chat template that is used.
    pub tokenizer: Tokenizer,
    /// Where its files are.
    pub folder: PathBuf,
    /// What the chat template is told beside the conversation.
    pub variables: Map<String, Value>,
    /// How texts are drawn where a request doesn't say.
    pub defaults: GenerateOptions,
}

/// A server that runs, on threads of its own. Dropping it ends it at once.
pub struct Server {
    address: SocketAddr,
    app: Shared,
    stop: watch::Sender<bool>,
    ended: std::sync::mpsc::Receiver<()>,
    /// Before the runtime, which they use.
    jobs: Jobs,
    runtime: Runtime,
}

impl Server {
    /// Starts an engine for `base` and listens.
    ///
    /// # Errors
    /// When an option cannot work, the data folder cannot be used, there is no memory for the cache, or the address is
    /// taken.
    pub fn start(base: Base, options: Options) -> Result<Self> {
        options.validate()?;
        let acceptor = options.tls.as_ref().map(tls::acceptor).transpose()?;
        let store = Store::open(&options.data)?;
        let keyless = options.api_keys.is_empty() && !store.has_keys()?;
        if keyless && !options.address.ip().is_loopback() && !options.allow_anyone {
            return Err(Error::option(
                "address",
                format!(
                    "{} can be reached by others, and there is no API key: make one, or say that anyone may ask",
                    options.address
                ),
            ));
        }
        let grammars = Grammars::new(&base.tokenizer, base.model.config().vocab_size);
        if let Err(error) = &grammars {
            tracing::warn!("{error}; texts can't be made to follow a schema");
        }
        let tokenizer = Arc::new(base.tokenizer);
        let replicas = Replicas::start(&base.model, &base.replicas, &tokenizer, &options)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(
                std::thread::available_parallelism().map_or(2, |cores| cores.get().min(4)),
            )
            .thread_name("serve")
            .enable_all()
            .build()
            .map_err(|error| Error::option("threads", format!("cannot be started: {error}")))?;
        let failed = |error: std::io::Error| {
            let address = options.address;
            Error::option("address", format!("cannot listen on {address}: {error}"))
        };
        let listener = runtime.block_on(TcpListener::bind(options.address)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let app = Arc::new(App {
            model: base.model,
            folder: base.folder,
            started: now(),
            tokenizer,
            variables: base.variables,
            defaults: base.defaults,
            turns: replicas.first.turns.clone(),
            replicas,
            grammars: grammars.ok().map(Arc::new),
            adapters: Adapters::default(),
            store,
            merging: Arc::new(Semaphore::new(api::MERGED_AT_ONCE)),
            gate: Gate::new(!keyless),
            metrics: Metrics::default(),
            options,
        });
        let jobs = {
            let _runtime = runtime.enter();
            Jobs::start(&app)?
        };
        let (stop, stopped) = watch::channel(false);
        let (end, ended) = std::sync::mpsc::channel();
        runtime.spawn({
            let app = app.clone();
            async move {
                accept(listener, acceptor, app, stopped).await;
                let _ = end.send(());
            }
        });
        Ok(Self { address, app, stop, ended, jobs, runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no new requests, lets those under way end within [`Options::grace`], stops a job under way after its step
    /// with a checkpoint, and ends.
    pub fn stop(self) {
        let _ = self.stop.send(true);
        self.jobs.stop();
        let grace = self.app.options.grace;
        let _ = self.ended.recv_timeout(grace + Duration::from_secs(1));
        self.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// The routes with what holds for all of them.
fn router(app: &Shared) -> Router {
    let state =
        Limits { app: app.clone(), permits: Arc::new(Semaphore::new(app.options.max_requests)) };
    let routes = api::routes()
        .merge(web::routes())
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(app.options.max_body))
        .layer(RequestBodyTimeoutLayer::new(PATIENCE))
        .layer(middleware::from_fn_with_state(app.clone(), keys::check))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(state, limit))
        .with_state(app.clone());
    match cors(&app.options.cors_origins) {
        Some(layer) => routes.layer(layer),
        None => routes,
    }
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE]);
    let all = origins.iter().any(|origin| origin == "*");
    let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    Some(match all {
        true => layer.allow_origin(tower_http::cors::Any),
        false => layer.allow_origin(origins.collect::<Vec<_>>()),
    })
}

async fn unknown(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Unknown request URL: {method} {}", metal_candle::readable(path));
    ApiError::not_found(message).coded("unknown_url")
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Not allowed: {method} on {}", metal_candle::readable(path));
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}

fn panicked(_: Box<dyn Any + Send + 'static>) -> Response {
    // What it was is on stderr.
    ApiError::internal("the server failed on this request").into_response()
}

#[derive(Clone)]
struct Limits {
    app: Shared,
    permits: Arc<Semaphore>,
}

/// Counts requests and refuses those beyond the limit. One is under way until its answer is sent.
async fn limit(State(limits): State<Limits>, request: Request, next: Next) -> Response {
    let Limits { app, permits } = limits;
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let Ok(permit) = permits.try_acquire_owned() else {
        let most = app.options.max_requests;
        return ApiError::busy(format!("{most} requests are under way already")).into_response();
    };
    let under_way = UnderWay::new(app.clone(), permit);
    let response = next.run(request).await;
    app.metrics.answered(route.as_deref().unwrap_or("other"), response.status().as_u16());
    response.map(|body| Body::new(Answer::new(body, under_way)))
}

/// A request under way.
struct UnderWay {
    app: Shared,
    _permit: OwnedSemaphorePermit,
}

impl UnderWay {
    fn new(app: Shared, permit: OwnedSemaphorePermit) -> Self {
        app.metrics.began();
        Self { app, _permit: permit }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.app.metrics.ended();
    }
}

/// The body of an answer, with whose end what the request holds is given back.
pub struct Answer<T> {
    body: Body,
    _held: T,
}

impl<T> Answer<T> {
    /// `held` until `body` is sent or given up.
    pub fn new(body: Body, held: T) -> Self {
        Self { body, _held: held }
    }
}

impl<T: Unpin> HttpBody for Answer<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// Takes connections until it is told to stop, and then waits for those under way.
async fn accept(
    listener: TcpListener,
    acceptor: Option<tls::Acceptor>,
    app: Shared,
    mut stopped: watch::Receiver<bool>,
) {
    let router = router(&app);
    let graceful = GracefulShutdown::new();
    let room = descriptors::connections(app.options.max_requests).min(Semaphore::MAX_PERMITS);
    let room = Arc::new(Semaphore::new(room));
    loop {
        let next = async {
            // What there is no room for waits in the system's queue.
            let permit = room.clone().acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (connection, permit) = tokio::select! {
            next = next => next,
            _ = stopped.changed() => break,
        };
        let stream = match connection {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many files are open, or the other side has left.
                tracing::warn!("a connection failed: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are sent as they come.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(64 << 10);
        match acceptor.clone() {
            None => {
                let serving = http.serve_connection(TokioIo::new(stream), service);
                let serving = graceful.watch(serving);
                tokio::spawn(async move {
                    let _permit = permit;
                    let _ = serving.await;
                });
            }
            Some(acceptor) => {
                let watcher = graceful.watcher();
                tokio::spawn(async move {
                    let _permit = permit;
                    let stream = tokio::time::timeout(PATIENCE, acceptor.accept(stream)).await;
                    if let Ok(Ok(stream)) = stream {
                        let serving = http.serve_connection(TokioIo::new(stream), service);
                        let _ = watcher.watch(serving).await;
                    }
                });
            }
        }
    }
    drop(listener);
    let _ = tokio::time::timeout(app.options.grace, graceful.shutdown()).await;
}
