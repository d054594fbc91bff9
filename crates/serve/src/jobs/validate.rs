//! A new job's files: what is wrong with them, and the numbers that follow from them.

use super::check::{Report, check};
use super::plan::{Method, Plan, most_tokens};
use crate::app::{App, Shared};
use crate::store::{Job, JobError, Status};
use metal_candle::data::DataOptions;
use metal_candle::text::Tokenizer;
use metal_candle::{Error, Result};
use std::sync::Arc;
use tokio::runtime::Handle;

/// The kinds of records that are compared, as the library calls them.
const PAIRS: &str = "preference pairs";
const LABELLED: &str = "labelled answers";

/// How records become examples for a method.
pub(crate) fn data_options(app: &App, method: Method) -> DataOptions {
    DataOptions {
        max_seq_length: most_tokens(app.model.config().context()),
        variables: app.variables.clone(),
        now: Some(chrono::Local::now().naive_local()),
        samples: method.samples(),
        ..DataOptions::default()
    }
}

/// The tokenizer of the model that a job begins with.
pub(super) fn tokenizer(
    app: &Shared,
    runtime: &Handle,
    job: &Job,
) -> std::result::Result<Arc<Tokenizer>, JobError> {
    if job.asked.model == job.asked.base {
        return Ok(app.tokenizer.clone());
    }
    let chosen = runtime.block_on(app.choose(&job.asked.model));
    chosen.map(|chosen| chosen.tokenizer).map_err(|error| JobError {
        code: "model_not_found".into(),
        message: app.store.without_paths(&error.message),
        param: Some("model".into()),
    })
}

/// Looks at the files of a job: it is put into the queue, or fails.
pub(super) fn validate(app: &Shared, runtime: &Handle, job: &Job) -> Result<()> {
    let tokenizer = match tokenizer(app, runtime, job) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return app.store.fail_job(&job.id, &error),
    };
    let method = job.asked.hyperparameters.method;
    let options = data_options(app, method);
    let files = [
        ("training_file", Some(&job.asked.training_file)),
        ("validation_file", job.asked.validation_file.as_ref()),
    ];
    let (mut longest, mut examples, mut warnings) = (2, 0, Vec::new());
    for (param, file) in files {
        let Some(file) = file else { continue };
        let failed = |message: String| JobError {
            code: format!("invalid_{param}"),
            message,
            param: Some(param.into()),
        };
        let Some(stored) = app.store.file(file)? else {
            let error = failed(format!("The file {file} is not there any more."));
            return app.store.fail_job(&job.id, &error);
        };
        let path = app.store.file_path(&stored);
        let report = match check(&path, &tokenizer, &options, &|| is_given_up(app, job)) {
            Ok(report) => report,
            Err(error @ Error::Io { .. }) => return Err(error),
            Err(error) => {
                let error = failed(app.store.without_paths(&error.to_string()));
                return app.store.fail_job(&job.id, &error);
            }
        };
        if is_given_up(app, job) {
            return Ok(());
        }
        if let Some(problem) = problem(&report, method) {
            let words = param.replace('_', " ");
            let message = format!("The job failed due to an invalid {words}. {problem}");
            return app.store.fail_job(&job.id, &failed(message));
        }
        longest = longest.max(report.longest);
        if param == "training_file" {
            examples = report.records - report.nothing_learned;
        }
        warnings.extend(warnings_of(&report, file));
    }
    let chosen = job.asked.hyperparameters.choose(examples);
    let plan = Plan::new(
        method,
        chosen,
        (longest, options.max_seq_length),
        &options.variables,
        job.asked.seed.unsigned_abs(),
        options.now.unwrap_or_default(),
    );
    let hyperparameters = job.asked.hyperparameters.chosen(chosen);
    app.store.queue_job(&job.id, &hyperparameters, &plan, &warnings)
}

/// Whether nobody waits for the result any more.
fn is_given_up(app: &App, job: &Job) -> bool {
    app.store.signals.is_ending()
        || !matches!(app.store.job(&job.id), Ok(Some(Job { status: Status::ValidatingFiles, .. })))
}

/// Why a file can't be learned from by this method.
fn problem(report: &Report, method: Method) -> Option<String> {
    if !report.problems.is_empty() {
        return Some(format!("Invalid file format: {}", report.told()));
    }
    if report.records == 0 {
        return Some("The file is empty; it needs at least 1 example.".into());
    }
    let fits = |kind: &str| match method {
        Method::Supervised => ![PAIRS, LABELLED].contains(&kind),
        Method::Dpo => kind == PAIRS,
    };
    if let Some((kind, count)) = report.kinds.iter().find(|(kind, _)| !fits(kind)) {
        let expected = match method {
            Method::Supervised => {
                "conversations {\"messages\": [...]}; preference pairs are for the method dpo"
            }
            Method::Dpo => {
                "preference pairs {\"input\": {\"messages\": [...]}, \"preferred_output\": [...], \
                 \"non_preferred_output\": [...]}, or {\"prompt\": ..., \"chosen\": ..., \"rejected\": ...}"
            }
        };
        return Some(format!(
            "The file has {count} {kind}; the method {} expects {expected}.",
            method.name()
        ));
    }
    (report.nothing_learned == report.records).then(|| {
        format!(
            "Nothing is learned from any of the {} examples: the assistant says nothing in them, or all of its messages \
             have the weight 0.",
            report.records
        )
    })
}

/// What somebody should know of a file that can be used.
fn warnings_of(report: &Report, file: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.truncated > 0 {
        warnings.push(format!(
            "{file}: {} of {} examples are longer than {} tokens and are cut there",
            report.truncated, report.records, report.max_tokens
        ));
    }
    if report.nothing_learned > 0 {
        warnings.push(format!(
            "{file}: nothing is learned from {} of {} examples, which are left out",
            report.nothing_learned, report.records
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::super::check::Problem;
    use super::*;
    use std::collections::BTreeMap;

    fn report(kind: &'static str, records: usize) -> Report {
        Report { records, kinds: BTreeMap::from([(kind, records)]), ..Report::default() }
    }

    #[test]
    fn files_that_do_not_fit_the_method_are_refused() {
        let supervised = |report: &Report| problem(report, Method::Supervised);
        assert_eq!(supervised(&report("conversations", 3)), None);
        assert_eq!(problem(&report(PAIRS, 3), Method::Dpo), None);
        assert!(supervised(&report(PAIRS, 3)).unwrap().contains("has 3 preference pairs"));
        let told = problem(&report("conversations", 2), Method::Dpo).unwrap();
        assert!(told.contains("dpo expects preference pairs"), "{told}");
        assert!(supervised(&Report::default()).unwrap().contains("is empty"));
        let nothing = Report { nothing_learned: 2, ..report("conversations", 2) };
        assert!(supervised(&nothing).unwrap().contains("Nothing is learned"));
        let problems: Vec<Problem> =
            (1..=7).map(|line| Problem { line, message: "is wrong".into() }).collect();
        let told = supervised(&Report { problems, ..report("conversations", 3) }).unwrap();
        assert!(told.starts_with("Invalid file format: line 1: is wrong; line 2: "), "{told}");
        assert!(told.ends_with("and 2 more lines"), "{told}");
    }
}
