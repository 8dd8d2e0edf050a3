"""From a config of another tool to a recipe (`launcher new from=FILE`): a module for each tool."""
