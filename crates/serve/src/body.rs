//! What a request brings: JSON that is told apart field by field, and queries.

use crate::error::ApiError;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use metal_candle::readable;
use serde::de::DeserializeOwned;

/// The JSON of a request. What is wrong with it is a 400 that names the field.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(|error| {
            let kind = "invalid_request_error";
            match error.status() {
                StatusCode::PAYLOAD_TOO_LARGE => {
                    ApiError::new(error.status(), kind, "the request's body is too large")
                }
                _ => ApiError::invalid(format!("the request's body cannot be read: {error}")),
            }
        })?;
        parse(&bytes).map(Self)
    }
}

/// A value of JSON.
///
/// # Errors
/// A 400 that names the field.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // A list would be read as the fields in the order in which they are declared.
    if bytes.trim_ascii_start().starts_with(b"[") {
        return Err(ApiError::invalid("the body is a list, expected an object of JSON"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let read = serde_path_to_error::deserialize(&mut reader);
    let value = read.map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let what = readable(&inner.to_string()).into_owned();
        if !inner.is_data() {
            return ApiError::invalid(format!("the body is not JSON: {what}"));
        }
        let missing = what.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
        match (path.as_str(), missing) {
            (".", Some((name, _))) => ApiError::field(name, "is missing"),
            (_, Some((name, _))) => ApiError::field(format!("{path}.{name}"), "is missing"),
            (".", None) => ApiError::invalid(what),
            _ => ApiError::field(path, what),
        }
    })?;
    match reader.end() {
        Ok(()) => Ok(value),
        Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}"))),
    }
}

/// The query of a request. What is wrong with it is a 400.
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let read = Query::<T>::from_request_parts(parts, state).await;
        let Query(value) =
            read.map_err(|error| ApiError::invalid(readable(&error.body_text()).into_owned()))?;
        Ok(Self(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Point {
        #[allow(dead_code)]
        x: Vec<u32>,
    }

    #[test]
    fn a_wrong_field_is_named() {
        let wrong = |text: &str| parse::<Point>(text.as_bytes()).expect_err(text);
        let error = wrong(r#"{"x": [1, "a"]}"#);
        assert_eq!(error.param.as_deref(), Some("x[1]"));
        assert!(error.message.contains("expected u32"), "{}", error.message);
        let error = wrong(r#"{"x": [], "y": 1}"#);
        assert!(error.message.contains("`y`"), "{}", error.message);
        let error = wrong("{}");
        assert_eq!(error.param.as_deref(), Some("x"));
        assert!(error.message.contains("is missing"), "{}", error.message);
        assert!(wrong("[[1]]").message.contains("is a list, expected an object"));
        for text in ["", "{", "{\"x\": []} x", "\u{0}"] {
            assert!(wrong(text).message.starts_with("the body is not JSON"), "{text}");
        }
        assert!(parse::<Point>(&vec![b'['; 1 << 20]).is_err());
    }
}
