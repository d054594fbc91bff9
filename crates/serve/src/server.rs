//! The server: its threads, connections, limits, start and end.

use crate::adapters::Adapters;
use crate::api::health::PROBES;
use crate::app::{App, Shared, new_id, now};
use crate::connection::Patient;
use crate::context::LargeTexts;
use crate::error::ApiError;
use crate::jobs::Jobs;
use crate::keys::Gate;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::replicas::Replicas;
use crate::store::{Store, identity};
use crate::{api, app, descriptors, keys, tls, web};
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
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
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, CorsLayer};
use tower_http::timeout::RequestBodyTimeoutLayer;
use tracing::Instrument;

/// How long the head of a request may take, and each piece of its body.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of an answer that are handed to the connection at once. It takes no more of them while so many aren't sent.
const PIECE: usize = 16 << 10;
/// What an answer is called in the log.
const REQUEST_ID: &str = "x-request-id";

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
        options.check_reach()?;
        let acceptor = options.tls.as_ref().map(tls::acceptor).transpose()?;
        let store = Store::open(&options.data)?;
        check_base(&store, base.model.files(), &options)?;
        let keyless = options.api_keys.is_empty() && !store.has_keys()?;
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
            .max_blocking_threads(app::WAITING + app::QUICK)
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
            longest_token: longest_token(&tokenizer),
            large_texts: LargeTexts::default(),
            tokenizer,
            variables: base.variables,
            defaults: base.defaults,
            turns: replicas.first.turns.clone(),
            replicas,
            grammars: grammars.ok().map(Arc::new),
            adapters: Adapters::default(),
            store,
            waiting: Arc::new(Semaphore::new(app::WAITING)),
            embedding: Arc::new(Semaphore::new(api::EMBEDDED_AT_ONCE)),
            merging: Arc::new(Semaphore::new(api::MERGED_AT_ONCE)),
            gate: Gate::new(!keyless),
            metrics: Metrics::new(&options.model_name),
            options,
        });
        app.warn_of_hidden();
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

/// The most bytes that a token has. Its name has no fewer than what it stands for.
fn longest_token(tokenizer: &Tokenizer) -> usize {
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    ids.filter_map(|id| tokenizer.id_to_token(id)).map(|name| name.len()).max().unwrap_or(1)
}

/// That the jobs and models of the data folder are of this base. Those of others wait, which is said.
fn check_base(store: &Store, weights: &[PathBuf], options: &Options) -> Result<()> {
    let name = &options.model_name;
    if !store.take_base(name, &identity(weights)?)? {
        let data = options.data.display();
        return Err(Error::option(
            "model_name",
            format!(
                "is {name:?}, and {data} has jobs or models of another base of that name; give this one another \
                 (--served-model-name), or another data folder"
            ),
        ));
    }
    for other in store.others_wait(name)? {
        tracing::warn!("fine-tuning jobs of {other} wait for a server that serves it by that name");
    }
    Ok(())
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
        .layer(middleware::from_fn_with_state(state, name))
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
    // Clients send headers of their own, such as OpenAI's `x-stainless-os`.
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, HeaderName::from_static(REQUEST_ID)]);
    let all = origins.iter().any(|origin| origin == "*");
    let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    Some(match all {
        true => layer.allow_origin(tower_http::cors::Any),
        false => layer.allow_origin(origins.collect::<Vec<_>>()),
    })
}

async fn unknown(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Unknown request URL: {method} {}", metal_candle::readable(path));
    api::refusal(path, ApiError::not_found(message).coded("unknown_url"))
}

async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Not allowed: {method} on {}", metal_candle::readable(path));
    let kind = "invalid_request_error";
    api::refusal(path, ApiError::new(StatusCode::METHOD_NOT_ALLOWED, kind, message))
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

/// Names a request for its client and for the log.
async fn name(State(limits): State<Limits>, request: Request, next: Next) -> Response {
    let id = new_id("req_");
    let span = tracing::error_span!("request", id);
    let mut response = limit(limits, request, next).instrument(span).await;
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Counts requests and refuses those beyond the limit, but for probes. One is under way until its answer is sent.
async fn limit(limits: Limits, request: Request, next: Next) -> Response {
    let Limits { app, permits } = limits;
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let is_probe = route.as_deref().is_some_and(|route| PROBES.contains(&route));
    let permit = if is_probe { Ok(None) } else { permits.try_acquire_owned().map(Some) };
    let Ok(permit) = permit else {
        let most = app.options.max_requests;
        let error = ApiError::busy(format!("{most} requests are under way already"));
        return api::refusal(request.uri().path(), error);
    };
    let under_way = UnderWay::new(app.clone(), permit);
    let response = next.run(request).await;
    app.metrics.answered(route.as_deref().unwrap_or("other"), response.status().as_u16());
    response.map(|body| Body::new(Answer::new(body, under_way)))
}

/// A request under way.
struct UnderWay {
    app: Shared,
    _permit: Option<OwnedSemaphorePermit>,
}

impl UnderWay {
    fn new(app: Shared, permit: Option<OwnedSemaphorePermit>) -> Self {
        app.metrics.began();
        Self { app, _permit: permit }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.app.metrics.ended();
    }
}

/// The body of an answer, with whose end what the request holds is given back. It is handed on in pieces, as a connection
/// would take all of it at once otherwise, long before it is sent.
pub struct Answer<T> {
    body: Body,
    /// What is left of a larger piece.
    rest: Bytes,
    _held: T,
}

impl<T> Answer<T> {
    /// `held` until `body` is sent or given up.
    pub fn new(body: Body, held: T) -> Self {
        Self { body, rest: Bytes::new(), _held: held }
    }
}

impl<T: Unpin> HttpBody for Answer<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                end => return Poll::Ready(end),
            }
        }
        let piece = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        let body = self.body.size_hint();
        let mut hint = SizeHint::new();
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(body.lower() + rest);
        hint
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
        let stream = Patient::new(stream, app.options.timeout);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    #[test]
    fn what_a_request_holds_is_given_back_with_the_last_piece() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let held = Arc::new(());
        let bytes: Vec<u8> = (0..2 * PIECE + 5).map(|index| index as u8).collect();
        let mut answer = Answer::new(Body::from(bytes.clone()), held.clone());
        let mut read = Vec::new();
        while !answer.is_end_stream() {
            let left = (bytes.len() - read.len()) as u64;
            assert_eq!((answer.size_hint().exact(), Arc::strong_count(&held)), (Some(left), 2));
            let next = poll_fn(|context| Pin::new(&mut answer).poll_frame(context));
            let piece = runtime.block_on(next).unwrap().unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE);
            read.extend_from_slice(&piece);
        }
        assert_eq!(read, bytes);
    }
}
