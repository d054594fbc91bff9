//! Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// The result of a handler.
pub type Result<T, E = ApiError> = std::result::Result<T, E>;

/// What a request is answered with when it can't be done.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// The status. Clients try 408, 409, 429 and 5xx again.
    pub status: StatusCode,
    /// `invalid_request_error`, `authentication_error`, ...
    pub kind: &'static str,
    /// What was found and what was expected.
    pub message: String,
    /// The same in the words that Anthropic's clients look for, where they do.
    pub for_anthropic: Option<Box<str>>,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// A word for programs, such as `model_not_found`.
    pub code: Option<&'static str>,
    /// After how many seconds the same request may succeed.
    pub retry_after: Option<u64>,
}

impl ApiError {
    /// An error of this status and kind.
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            status,
            kind,
            message,
            for_anthropic: None,
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// 400: the request can't be meant so.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a field of the request is wrong; the message is `FIELD: WHAT`.
    pub fn field(param: impl Into<String>, what: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self::invalid(format!("{param}: {what}")).about(param)
    }

    /// 400: a field that OpenAI has and this server hasn't, with what there is instead.
    pub fn unsupported(param: impl Into<String>, instead: impl std::fmt::Display) -> Self {
        let mut error = Self::field(param, format_args!("is not supported; {instead}"));
        error.code = Some("unsupported_parameter");
        error
    }

    /// 404: there is nothing of this name.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// 404: there is no such model.
    pub fn no_model(name: &str) -> Self {
        let shown = metal_candle::readable(name);
        let message =
            format!("The model `{shown}` does not exist; GET /v1/models lists those there are");
        Self::not_found(message).about("model").coded("model_not_found")
    }

    /// 429: too much is asked for at once.
    pub fn busy(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        error.code = Some("rate_limit_exceeded");
        error.retry_after = Some(1);
        error
    }

    /// 504: it takes longer than the server lets it.
    pub fn timed_out(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).coded("timeout")
    }

    /// 500: it should have worked.
    pub fn internal(error: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", error.to_string())
    }

    /// The same error, about this field.
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The same error with a word for programs.
    pub fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body of an answer, and a stream's last event if it fails under way.
    pub fn body(&self) -> serde_json::Value {
        let Self { kind, message, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl From<metal_candle::Error> for ApiError {
    /// Wrong options are the caller's, everything else the server's.
    fn from(error: metal_candle::Error) -> Self {
        match &error {
            metal_candle::Error::Option { option, .. } if option == "max_waiting" => {
                Self::busy(error.to_string())
            }
            metal_candle::Error::Option { option, .. } => {
                Self::invalid(error.to_string()).about(option.clone())
            }
            metal_candle::Error::Template(_) => Self::invalid(error.to_string()).about("messages"),
            metal_candle::Error::Unsupported(_) => Self::invalid(error.to_string()),
            _ => Self::internal(error),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::error!("{}", self.message);
        }
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
