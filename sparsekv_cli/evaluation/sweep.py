"""``--sweep budget=1%,5%``: methods with several values of an option each, as texts of methods."""

from collections.abc import Sequence

from sparsekv_cli.methods import method_class
from sparsekv_cli.settings.option import did_you_mean, options_of


def option_names(spec: str) -> list[str]:
    """Returns the options that the method of ``spec`` takes, also by their old names."""
    method = method_class(spec.partition(":")[0])
    return [*options_of(method), *method.renamed]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """``budget=1%,5%`` -> the option and its values.

    Raises ValueError, which says what is wrong.

    Values with commas in them, such as those of dense_layers, are parted by ``;``.
    """
    option, equals, listed = text.partition("=")
    values = [part.strip() for part in listed.split(";" if ";" in listed else ",")]
    if not equals or not option.strip() or not all(values):
        raise ValueError(f"{text!r}: expected OPTION=VALUE,VALUE as in budget=1%,5%")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r}: a value is given twice")
    return option.strip(), values


def swept(specs: Sequence[str], option: str, values: Sequence[str]) -> list[str]:
    """Returns each spec once for each value, if its method has the option and does not set it.

    ``full``, the reference, stays as it is. Raises ValueError if no method takes the option.
    """
    found: list[str] = []
    is_used = False
    for spec in specs:
        _, colon, stated = spec.partition(":")
        has = spec != "full" and option in option_names(spec)
        if has and option not in (each.partition("=")[0].strip() for each in stated.split(";")):
            is_used = True
            sign = ";" if colon else ":"
            found += [f"{spec}{sign}{option}={value}" for value in values]
        else:
            found.append(spec)
    if not is_used:
        known = {each for spec in specs if spec != "full" for each in option_names(spec)}
        close = did_you_mean(option, known)
        raise ValueError(f"--sweep: none of the methods takes an option {option!r}{close}")
    return found
