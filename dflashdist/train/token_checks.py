"""A job's tokens held to the target's tokenizer: the store's, and the mask token."""

from dflashdist.config import InputError
from dflashdist.data.chat import OWN
from dflashdist.data.tokenizer import TargetTokenizer, template_digest
from dflashdist.train.job import TrainingJob


def check_tokens(job: TrainingJob) -> None:
    """Hold that the store is the target's, and that its mask token means nothing else.

    A store rendered by a template's file is held to the tokenizer alone. Reads the tokenizer's
    files and all of the store's ids, so one rank does it for all. Raises InputError.
    """
    target = job.config.target
    tokenizer = TargetTokenizer.read(str(target.path), target.revision)
    check_store(job, tokenizer)
    check_mask_token(job, tokenizer)


def check_store(job: TrainingJob, target: TargetTokenizer) -> None:
    """Hold that the store was made with the target's own tokenizer, and template if it says so."""
    config, meta = job.config, job.store.meta
    differs = None
    if target.fingerprint != meta["tokenizer_fingerprint"]:
        differs = "tokenizer"
    elif meta.get("template") == OWN:
        found = template_digest(target.templates) if target.templates else None
        differs = "chat template" if found != meta["rendering"]["template_sha256"] else None
    if differs:
        raise InputError(
            f"{config.data.store}: made with another {differs} (of {meta['target']}) than "
            f"{config.target.path} has; prepare anew with --target {config.target.path}"
        )


def check_mask_token(job: TrainingJob, target: TargetTokenizer) -> None:
    """Refuse a mask token that the target emits, or that rows hold.

    A block of masks beside such a token in the text would mean two things at once.
    """
    mask = job.shape.mask_token_id
    eos = job.shape.eos_token_id
    roles = {
        "an end-of-turn token": {*target.end_ids, *(eos if isinstance(eos, tuple) else (eos,))},
        "the pad token": {target.pad_id, job.store.meta["pad_id"]},
        "the beginning-of-text token": {job.shape.bos_token_id},
    }
    for name, text in target.specials.items():
        roles.setdefault(name, set()).add(target.tokenizer.token_to_id(text))
    for role, ids in roles.items():
        if mask in ids:
            raise InputError(
                f"drafter.mask_token_id={mask}: is {role} of the target; take a row of its "
                "embedding that is never emitted, or null: the first one past the tokenizer"
            )
    stores = [store for store in (job.store, job.held_out) if store]
    found = sum(store.count_token(mask) for store in stores)
    if not found:
        return
    token = target.tokenizer.id_to_token(mask)
    text = f"drafter.mask_token_id={mask} ({token!r}) occurs {found:,} times in the rows"
    if not job.config.drafter.mask_token_in_data:
        raise InputError(
            f"{text}; take a token that does not, or null: the first embedding row past the "
            "tokenizer (drafter.mask_token_in_data=true trains all the same)"
        )
    job.notes.append(f"{text}: drafts learn that it is a mask and a word")
