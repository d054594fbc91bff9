//! TLS by a certificate and its key, both PEM files.

use metal_candle::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// What greets connections.
pub type Acceptor = TlsAcceptor;

/// The files of a certificate.
#[derive(Debug, Clone)]
pub struct Tls {
    /// The certificate and those up to its authority, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
}

/// What greets connections with a certificate.
///
/// # Errors
/// [`Error::File`] when a file is not what it should be, or the key is not the certificate's.
pub fn acceptor(tls: &Tls) -> Result<Acceptor> {
    let wrong = |path: &Path, reason: &dyn std::fmt::Display| {
        Error::file(path, format!("cannot be used for TLS: {reason}"))
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(&tls.certificate)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(&tls.certificate, &error))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| wrong(&tls.key, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&tls.certificate, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| wrong(&tls.certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
