"""``--sweep budget=1%,5%``: makes several methods of one, one for each value of an option."""

from collections.abc import Sequence

from sparsekv_cli.methods import method_class
from sparsekv_cli.settings.option import did_you_mean, options_of


def option_names(spec: str) -> list[str]:
    """Returns the names of the options of the method in ``spec``, old names included."""
    method = method_class(spec.partition(":")[0])
    return [*options_of(method), *method.renamed]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Returns the option and the values of a text: ``budget=1%,5%`` gives budget and [1%, 5%].

    If values contain commas, as dense_layers does, ``;`` separates them. Raises ValueError for a
    wrong text.
    """
    option, equals, listed = text.partition("=")
    values = [part.strip() for part in listed.split(";" if ";" in listed else ",")]
    if not equals or not option.strip() or not all(values):
        raise ValueError(f"{text!r}: expected OPTION=VALUE,VALUE as in budget=1%,5%")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r}: a value is given twice")
    return option.strip(), values


def swept(specs: Sequence[str], option: str, values: Sequence[str]) -> list[str]:
    """Returns each spec once for each value, if its method has the option and does not state it.

    Other specs, and ``full``, the reference, stay as they are. Raises ValueError if no spec has the
    option.
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
