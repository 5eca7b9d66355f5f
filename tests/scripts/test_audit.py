"""scripts/audit: the packages that the program needs, and their licences."""

from __future__ import annotations

import json

from scripts_as_modules import load_script


def test_licences_of_what_is_installed_and_no_more(tmp_path, capsys):
    told = tmp_path / "audit.json"
    assert load_script("audit").main(["--no-service", "--json", str(told)]) == 0
    licences = json.loads(told.read_text(encoding="utf-8"))["licences"]
    assert "BSD" in licences["numpy"] and "llvmlite" in licences and "starlette" in licences
    assert "pytest" not in licences and "sparsekv-cli" not in licences
    assert len(capsys.readouterr().out.splitlines()) == len(licences)


def test_without_the_service_nothing_is_called_safe(monkeypatch, capsys):
    audit = load_script("audit")
    monkeypatch.setattr(audit, "vulnerabilities", lambda packages: None)
    assert audit.main([]) == 2
    assert "are not known" in capsys.readouterr().out.splitlines()[-1]
