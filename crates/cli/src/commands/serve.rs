//! `serve`: an OpenAI endpoint on this machine.

use crate::engine::{AtOnce, Writing};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{self, Placed, Ranks, Runtime, Source, set_threads};
use crate::output::{Terminal, shell_word};
use crate::processes::Gpus;
use crate::remote::{API_KEY, keys_of, variable};
use crate::sampling;
use crate::template::TemplateFlags;
use anyhow::Context;
use candle_core::Device;
use clap::Args;
use metal_candle::Error;
use metal_candle::engine::EngineOptions;
use metal_candle::hub::HubOptions;
use metal_candle_serve::{Base, HubAdapters, Options, Server, Tls};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  metal-candle serve --model model/
  metal-candle serve --model owner/name --adapters adapters/ --port 8000
  METAL_CANDLE_API_KEY=... metal-candle serve --model model/ --host 0.0.0.0
  metal-candle serve --model model/ --gpus all
  metal-candle serve --model model/ --tensor-parallel 4

Clients are given the address with /v1 behind it as their base URL. A browser is shown a page there.";

/// How often it is looked whether to stop.
const GLANCE: Duration = Duration::from_millis(100);

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The model's folder, or its id on the Hugging Face hub
    #[arg(short, long, value_name = "DIR|ID", help_heading = "Model")]
    model: String,
    /// The branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REVISION", help_heading = "Model")]
    revision: Option<String>,
    /// What requests call the model; may be given several times, the first is the one that is listed
    /// [default: the model as it is given]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    served_model_name: Vec<String>,
    /// A folder whose folders are adapters, which requests name by theirs
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    adapters: Option<PathBuf>,
    /// Adapters in memory, at most; the least recently used goes first
    #[arg(long, value_name = "N", default_value_t = usual().max_adapters, help_heading = "Model")]
    max_adapters: usize,
    /// Refuse to load adapters by their path on this machine, as vLLM's route does
    #[arg(long, help_heading = "Model")]
    no_adapters_by_path: bool,
    /// Download adapters from the Hugging Face hub that requests name by their id, owner/name or owner/name@revision:
    /// every client can make the server do so, with the token that it has
    #[arg(long, help_heading = "Model")]
    hub_adapters: bool,
    /// Where files, jobs and keys are kept
    #[arg(long, value_name = "DIR", default_value = "metal-candle-data", help_heading = "Server")]
    data: PathBuf,
    /// The address to listen on
    #[arg(
        long,
        value_name = "IP",
        default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST),
        value_parser = host,
        help_heading = "Server"
    )]
    host: IpAddr,
    /// The port to listen on; 0 takes any that is free
    #[arg(long, value_name = "N", default_value_t = usual().address.port(), help_heading = "Server")]
    port: u16,
    /// A key that requests have to bring, with which everything may be done; may be given several times, and is better
    /// given as METAL_CANDLE_API_KEY, as others may see a command's flags
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    api_key: Vec<String>,
    /// Let everybody who reaches it ask, without a key
    #[arg(long, help_heading = "Server")]
    allow_anyone: bool,
    /// A certificate in PEM, for TLS
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = "Server")]
    tls_certificate: Option<PathBuf>,
    /// Its private key in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate", help_heading = "Server")]
    tls_key: Option<PathBuf>,
    /// A website whose pages may ask, such as https://example.org; may be given several times
    #[arg(long, value_name = "ORIGIN", help_heading = "Server")]
    cors_origin: Vec<String>,
    /// Requests under way, at most
    #[arg(long, value_name = "N", default_value_t = usual().max_requests, help_heading = "Limits")]
    max_requests: usize,
    /// Seconds that an answer may take that isn't streamed, a stream from one token to the next, and a client until it
    /// reads what is sent
    #[arg(long, value_name = "SECONDS", default_value_t = usual().timeout.as_secs(), help_heading = "Limits")]
    timeout: u64,
    /// Megabytes of an uploaded file, at most
    #[arg(long, value_name = "MB", default_value_t = usual().max_file >> 20, help_heading = "Limits")]
    max_file: u64,
    /// The share of the device's time that fine-tuning gets while texts are written
    #[arg(long, value_name = "X", default_value_t = usual().training_share, help_heading = "Limits")]
    training_share: f64,
    #[command(flatten)]
    at_once: AtOnce,
    /// Requests that wait, at most
    #[arg(long, value_name = "N", default_value_t = usual().engine.max_waiting, help_heading = "Engine")]
    max_waiting: usize,
    #[command(flatten)]
    writing: Writing,
    /// Write texts on so many NVIDIA GPUs of this machine, with the whole model on each, of which fine-tuning takes the first;
    /// with --tensor-parallel N, on each N of them
    #[arg(long, value_name = "N|all", help_heading = "Device")]
    gpus: Option<Gpus>,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    runtime: Runtime,
}

fn usual() -> Options {
    Options::new("", "")
}

impl Arguments {
    fn options(&self) -> anyhow::Result<Options> {
        let mut names = self.served_model_name.iter().cloned();
        let options = Options {
            address: SocketAddr::new(self.host, self.port),
            aliases: names.clone().skip(1).collect(),
            adapters: self.adapters.clone(),
            max_adapters: self.max_adapters,
            quantization: self.runtime.quantization()?,
            engine: EngineOptions {
                max_waiting: self.max_waiting,
                ..self.writing.options_for(&self.at_once)
            },
            api_keys: api_keys(&self.api_key, variable(API_KEY)?.as_deref())?,
            allow_anyone: self.allow_anyone,
            hub_adapters: self.hub()?,
            max_file: self.max_file.saturating_mul(1 << 20),
            max_requests: self.max_requests,
            timeout: Duration::from_secs(self.timeout),
            tls: self
                .tls_certificate
                .clone()
                .zip(self.tls_key.clone())
                .map(|(certificate, key)| Tls { certificate, key }),
            cors_origins: self.cors_origin.clone(),
            load_adapters_by_path: !self.no_adapters_by_path,
            training_share: self.training_share,
            ..Options::new(names.next().unwrap_or_else(|| name_of(&self.model)), &self.data)
        };
        options.validate().map_err(usage)?;
        options.check_reach().map_err(|error| match error {
            Error::Option { .. } => {
                let folder = shell_word(&self.data.display().to_string());
                usage(format!(
                    "{error}, by `metal-candle keys add NAME --data {folder}` or --allow-anyone"
                ))
            }
            error => error.into(),
        })?;
        if let Some(folder) = &self.adapters
            && !folder.is_dir()
        {
            return Err(usage(format!("adapters: {} is no folder", folder.display())));
        }
        Ok(options)
    }
}

impl Arguments {
    /// The device of each copy of the model, or the devices that have a part of it each.
    fn places(&self) -> anyhow::Result<Vec<Vec<Device>>> {
        let processor = self.runtime.device;
        let Some(gpus) = self.gpus else {
            return Ok(vec![self.ranks.devices(processor, &self.writing)?]);
        };
        let (all, ranks) = (gpus.devices(processor, Gpus::FLAG)?, self.ranks.count(&self.writing)?);
        if !all.len().is_multiple_of(ranks) {
            let found = all.len();
            return Err(usage(format!(
                "--gpus: are {found}, expected a multiple of --tensor-parallel, which is {ranks}"
            )));
        }
        Ok(all.chunks(ranks).map(<[Device]>::to_vec).collect())
    }

    /// Where adapters are brought from, if they are to be. They are kept with the server's other data.
    fn hub(&self) -> anyhow::Result<Option<HubAdapters>> {
        if !self.hub_adapters {
            return Ok(None);
        }
        let hub = HubOptions { cache: self.data.join("hub"), ..HubOptions::from_env()? };
        Ok(Some(HubAdapters::new(hub)))
    }
}

/// The keys of the flags, or else those of the variable, each with commas between them.
///
/// # Errors
/// When one of them has none: whoever gives it wants the server to be closed.
fn api_keys(flags: &[String], variable: Option<&str>) -> anyhow::Result<Vec<String>> {
    let flags: Vec<(&str, &str)> = flags.iter().map(|flag| ("api_key", flag.as_str())).collect();
    let variable = variable.filter(|_| flags.is_empty()).map(|keys| (API_KEY, keys));
    let mut keys = Vec::new();
    for (name, list) in flags.into_iter().chain(variable) {
        let before = keys.len();
        keys.extend(keys_of(list).map(String::from));
        if keys.len() == before {
            return Err(usage(format!("{name}: has no key in it; leave it out for none")));
        }
    }
    Ok(keys)
}

/// An address to listen on.
fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text.parse().map_err(|_| {
            "expected an address of this machine, such as `127.0.0.1`, or `0.0.0.0` for all".into()
        }),
    }
}

/// A model's usual name: its id on the hub, or that of its folder.
fn name_of(model: &str) -> String {
    let path = Path::new(model);
    let folder = path.is_dir().then(|| path.canonicalize().ok()).flatten();
    let name = folder.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.unwrap_or(model).to_string()
}

/// Serves until it is told to stop.
pub fn run(arguments: Arguments, terminal: Terminal) -> anyhow::Result<u8> {
    let places = arguments.places()?;
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    let mut options = arguments.options()?;
    let Some((first, others)) = places.split_first() else { return Err(usage("--gpus: is 0")) };
    if !others.is_empty() && arguments.writing.draft_model.is_some() {
        return Err(usage("draft_model: is for one device, and there are several"));
    }
    let source = Source {
        model: Some(arguments.model.clone()),
        revision: arguments.revision.clone(),
        adapter: None,
    };
    let (runtime, placed) = (&arguments.runtime, Placed::default());
    arguments.writing.check_draft(&source, terminal)?;
    let loaded = source.load_on(first, runtime, &placed, &arguments.template, terminal)?;
    options.engine.draft_model = arguments.writing.draft_model(&loaded, terminal)?;
    let mut replicas = Vec::new();
    for devices in others {
        let holding = runtime.quantization()?.into();
        replicas.push(models::load_on(devices, &loaded.folder, loaded.model.dtype(), holding)?);
    }
    let base = Base {
        replicas,
        defaults: sampling::defaults(&loaded.folder)?,
        model: loaded.model,
        tokenizer: loaded.tokenizer,
        folder: loaded.folder,
        variables: loaded.variables,
    };
    let (name, secure) = (options.model_name.clone(), options.tls.is_some());
    let stop = interrupt::watch(
        "stopping once the answers under way are written; Ctrl-C again stops at once",
    );
    let server = Server::start(base, options).context("cannot serve")?;
    let scheme = if secure { "https" } else { "http" };
    terminal.note(format!(
        "{name} is served at {scheme}://{}, for OpenAI's clients with /v1 behind it",
        server.address()
    ));
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(GLANCE);
    }
    server.stop();
    Ok(SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_that_clients_can_send() {
        let keys = |flags: &[&str], variable| {
            let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
            api_keys(&flags, variable).map_err(|error| error.to_string())
        };
        assert_eq!(keys(&[], None).unwrap(), [""; 0]);
        assert_eq!(keys(&[], Some("a, b ,,")).unwrap(), ["a", "b"]);
        assert_eq!(keys(&["c, d", "e"], Some("a")).unwrap(), ["c", "d", "e"]);
        assert!(keys(&["a", " "], None).unwrap_err().starts_with("api_key: has no key"));
        // As `${ONE},${OTHER}` of two that aren't set.
        let error = keys(&[], Some(",")).unwrap_err();
        assert!(error.starts_with("METAL_CANDLE_API_KEY: has no key"), "{error}");
    }

    #[test]
    fn hosts_are_addresses_of_this_machine() {
        assert_eq!(host("localhost"), Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(host("::1").map(|it| it.is_loopback()), Ok(true));
        assert!(host("example.org").is_err_and(|error| error.contains("`0.0.0.0`")));
    }
}
